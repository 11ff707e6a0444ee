// What the cases of Testcontainers share.
'use strict';

const {GenericContainer, Wait} = require('testcontainers');

const image = process.env.IMAGE;
const web = ['sh', '-c', 'mkdir -p /www; echo hello > /www/index.html; echo ready; exec httpd -f -p 8080 -h /www'];

const generic = () => new GenericContainer(image).withStartupTimeout(20000);

// server is a container that answers HTTP on a published port.
const server = () => generic().withCommand(web).withExposedPorts(8080);

// sleeper is a container that does nothing.
const sleeper = () => generic().withCommand(['sh', '-c', 'echo ready; exec sleep 300']).withWaitStrategy(Wait.forLogMessage('ready'));

const start = async (t, container) => {
	const started = await container.start();
	t.after(() => started.stop({timeout: 0, remove: true, removeVolumes: true}));
	return started;
};

const get = async (container, path = '/') =>
	(await fetch(`http://${container.getHost()}:${container.getMappedPort(8080)}${path}`)).text();

module.exports = {generic, get, image, server, sleeper, start};
