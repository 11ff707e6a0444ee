// Runs the cases that need the reaper.
'use strict';

const assert = require('node:assert');
const {execFileSync} = require('node:child_process');
const Docker = require('dockerode');
const {Network} = require('testcontainers');
const {getReaper} = require('testcontainers/build/reaper/reaper.js');
const {getContainerRuntimeClient} = require('testcontainers/build/container-runtime/index.js');
const {main, test, until} = require('../tap.js');
const {sleeper, start} = require('./fixture.js');

const docker = new Docker();

if (process.argv[2] === 'child') {
	(async () => {
		const network = await new Network().start();
		const c = await sleeper().withNetwork(network).start();
		process.stdout.write(JSON.stringify({container: c.getId(), network: network.getId()}));
		process.exit(0);
	})();
} else {
	test('ryuk starts', async (t) => {
		await start(t, sleeper());
		const reaper = await getReaper(await getContainerRuntimeClient());
		assert.match(reaper.containerId, /^[0-9a-f]{64}$/);
		assert.equal((await docker.getContainer(reaper.containerId).inspect()).State.Running, true);
	});

	test('ryuk labels its session', async (t) => {
		const c = await start(t, sleeper());
		assert.ok(c.getLabels()['org.testcontainers.session-id']);
	});

	test('ryuk can be left out for a container', async (t) => {
		const c = await start(t, sleeper().withAutoCleanup(false));
		assert.equal(c.getLabels()['org.testcontainers.session-id'], undefined);
	});

	test('ryuk removes what a process left', async () => {
		// Without it the child starts a reaper, rather than use this process's.
		const reaper = await getReaper(await getContainerRuntimeClient());
		await docker.getContainer(reaper.containerId).remove({force: true}).catch(() => {});
		await until('the reaper is gone', () => docker.getContainer(reaper.containerId).inspect().then(() => false, () => true));
		const made = JSON.parse(execFileSync(process.execPath, [__filename, 'child']));
		const gone = (object) => object.inspect().then(() => false, (e) => e.statusCode === 404);
		await until('the container is gone', () => gone(docker.getContainer(made.container)));
		await until('the network is gone', () => gone(docker.getNetwork(made.network)));
	});

	main(60000);
}
