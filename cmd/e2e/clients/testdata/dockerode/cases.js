// Runs the cases of dockerode.
'use strict';

require('./containers.js');
require('./objects.js');
require('../tap.js').main();
