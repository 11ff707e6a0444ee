// Runs the cases that need no reaper.
'use strict';

const assert = require('node:assert');
const fs = require('node:fs');
const path = require('node:path');
const tar = require('tar-stream');
const {DockerComposeEnvironment, GenericContainer, getContainerRuntimeClient, ImageName, Network, PullPolicy, Wait} = require('testcontainers');
const {main, test, unique, until} = require('../tap.js');
const {generic, get, image, server, sleeper, start} = require('./fixture.js');

const read = async (c, file) => (await c.exec(['cat', file])).output;

const text = async (stream) => {
	let all = '';
	for await (const part of stream) all += part;
	return all;
};

const lines = (stream, wanted) => new Promise((resolve) => {
	stream.on('data', (line) => { if (String(line).includes(wanted)) resolve(); });
});

const temporary = (t, files) => {
	const dir = fs.mkdtempSync('testcontainers-');
	t.after(() => fs.rmSync(dir, {recursive: true}));
	for (const [name, content] of Object.entries(files)) fs.writeFileSync(path.join(dir, name), content);
	return path.resolve(dir);
};

test('runtime info', async () => {
	const client = await getContainerRuntimeClient();
	assert.ok(client.info.containerRuntime.serverVersion);
	assert.ok(client.info.containerRuntime.memory > 0);
	assert.ok(client.info.containerRuntime.host);
});

test('wait for listening ports', async (t) => {
	assert.equal(await get(await start(t, server())), 'hello\n');
});

test('wait for HTTP', async (t) => {
	await start(t, server().withWaitStrategy(Wait.forHttp('/', 8080).forStatusCode(200).forResponsePredicate((body) => body === 'hello\n')));
});

test('wait for a log message', async (t) => {
	await start(t, server().withWaitStrategy(Wait.forLogMessage(/rea.y/)));
});

test('wait for a log message several times', async (t) => {
	await start(t, generic().withCommand(['sh', '-c', 'echo x; echo x; exec sleep 300']).withWaitStrategy(Wait.forLogMessage('x', 2)));
});

test('wait for a health check', async (t) => {
	await start(t, sleeper().withHealthCheck({test: ['CMD-SHELL', 'true'], interval: 1000, timeout: 1000, retries: 5, startPeriod: 0}).withWaitStrategy(Wait.forHealthCheck()));
});

test('wait for a command', async (t) => {
	await start(t, server().withWaitStrategy(Wait.forSuccessfulCommand('test -e /www/index.html')));
});

test('wait for the end', async (t) => {
	await start(t, generic().withCommand(['true']).withWaitStrategy(Wait.forOneShotStartup()));
});

test('wait for several', async (t) => {
	await start(t, server().withWaitStrategy(Wait.forAll([Wait.forListeningPorts(), Wait.forLogMessage('ready')]).withDeadline(20000)));
});

test('wait in vain', async () => {
	await assert.rejects(sleeper().withStartupTimeout(1000).withWaitStrategy(Wait.forLogMessage('never')).start());
});

test('ports', async (t) => {
	const c = await start(t, server().withExposedPorts(8081, {container: 8082, host: 41082}, '53/udp').withWaitStrategy(Wait.forLogMessage('ready')));
	assert.equal(c.getMappedPort(8082), 41082);
	assert.ok(c.getMappedPort(8080) > 0 && c.getMappedPort('53/udp') > 0 && c.getFirstMappedPort() > 0);
});

test('environment, user, working directory, entrypoint and hostname', async (t) => {
	const c = await start(t, generic().withEnvironment({A: 'b'}).withUser('1000').withWorkingDir('/tmp').withHostname('h')
		.withEntrypoint(['sh', '-c']).withCommand(['echo $A $PWD $(id -u) $(hostname); sleep 300']).withWaitStrategy(Wait.forLogMessage('b /tmp 1000 h')));
	assert.equal((await c.exec('pwd')).output, '/tmp\n');
});

test('labels', async (t) => {
	const c = await start(t, sleeper().withLabels({k: 'v'}));
	assert.equal(c.getLabels().k, 'v');
});

test('labels are the given ones', async (t) => {
	const c = await start(t, sleeper().withLabels({k: 'v'}));
	const foreign = Object.keys(c.getLabels()).filter((name) => name !== 'k' && !name.startsWith('org.testcontainers'));
	assert.deepEqual(foreign, []);
});

test('name', async (t) => {
	const name = unique('c');
	const c = await start(t, sleeper().withName(name));
	assert.equal(c.getName(), '/' + name);
});

test('tmpfs', async (t) => {
	const c = await start(t, sleeper().withTmpFs({'/mem': 'rw,noexec,nosuid,size=65536k'}));
	assert.match(await read(c, '/proc/mounts'), /\/mem tmpfs/);
});

test('bind mounts', async (t) => {
	const dir = temporary(t, {file: 'from the host\n'});
	const c = await start(t, sleeper().withBindMounts([{source: dir, target: '/work', mode: 'ro'}]));
	assert.equal(await read(c, '/work/file'), 'from the host\n');
});

test('bind mount of a file', async (t) => {
	const dir = temporary(t, {file: 'a file\n'});
	const c = await start(t, sleeper().withBindMounts([{source: dir + '/file', target: '/file', mode: 'ro'}]));
	assert.equal(await read(c, '/file'), 'a file\n');
});

test('ulimits', async (t) => {
	const c = await start(t, sleeper().withUlimits({nofile: {hard: 1000, soft: 500}}));
	assert.match(await read(c, '/proc/1/limits'), /Max open files +500 +1000 /); // an exec's are others with some releases of runc
});

test('capabilities', async (t) => {
	const c = await start(t, sleeper().withDroppedCapabilities('ALL').withAddedCapabilities('CHOWN'));
	assert.match(await read(c, '/proc/self/status'), /CapEff:\s*0000000000000001/);
});

test('security options', async (t) => {
	const c = await start(t, sleeper().withSecurityOpt('no-new-privileges'));
	assert.match(await read(c, '/proc/self/status'), /NoNewPrivs:\s*1/);
});

test('resources', async (t) => {
	await start(t, sleeper().withResourcesQuota({memory: 0.1, cpu: 0.5}));
});

test('shared memory', async (t) => {
	const c = await start(t, sleeper().withSharedMemorySize(16 << 20));
	assert.match(await read(c, '/proc/mounts'), /\/dev\/shm .*size=16384k/);
});

test('extra hosts', async (t) => {
	const c = await start(t, sleeper().withExtraHosts([{host: 'other', ipAddress: '192.0.2.1'}]));
	assert.match(await read(c, '/etc/hosts'), /192\.0\.2\.1\tother/);
});

test('platform', async (t) => {
	await start(t, sleeper().withPlatform('linux/amd64'));
});

test('pull policy', async (t) => {
	await start(t, sleeper().withPullPolicy(PullPolicy.defaultPolicy()));
	assert.equal(ImageName.fromString('alpine:3.20').string, 'alpine:3.20');
});

test('default log driver', async (t) => {
	await start(t, sleeper().withDefaultLogDriver());
});

test('IPC mode', async (t) => {
	await start(t, sleeper().withIpcMode('private'));
});

test('network mode none', async (t) => {
	await start(t, sleeper().withNetworkMode('none'));
});

test('network mode bridge', async (t) => {
	await start(t, sleeper().withNetworkMode('bridge'));
});

test('copy content', async (t) => {
	const c = await start(t, sleeper().withCopyContentToContainer([{content: 'content', target: '/tmp/content', mode: 0o600}]));
	assert.equal(await read(c, '/tmp/content'), 'content');
	await c.copyContentToContainer([{content: 'more', target: '/tmp/more'}]);
	assert.equal(await read(c, '/tmp/more'), 'more');
});

test('copy files', async (t) => {
	const dir = temporary(t, {file: 'file'});
	const c = await start(t, sleeper().withCopyFilesToContainer([{source: dir + '/file', target: '/tmp/file'}]));
	assert.equal(await read(c, '/tmp/file'), 'file');
	await c.copyFilesToContainer([{source: dir + '/file', target: '/tmp/again'}]);
	assert.equal(await read(c, '/tmp/again'), 'file');
});

test('copy directories', async (t) => {
	const dir = temporary(t, {a: 'a', b: 'b'});
	const c = await start(t, sleeper().withCopyDirectoriesToContainer([{source: dir, target: '/tmp/dir'}]));
	assert.equal(await read(c, '/tmp/dir/b'), 'b');
	await c.copyDirectoriesToContainer([{source: dir, target: '/tmp/again'}]);
	assert.equal(await read(c, '/tmp/again/a'), 'a');
});

test('copy an archive', async (t) => {
	const pack = () => {
		const archive = tar.pack();
		archive.entry({name: 'archived'}, 'archived');
		archive.finalize();
		return archive;
	};
	const c = await start(t, sleeper().withCopyArchivesToContainer([{tar: pack(), target: '/tmp'}]));
	assert.equal(await read(c, '/tmp/archived'), 'archived');
	await c.copyArchiveToContainer(pack(), '/');
	assert.equal(await read(c, '/archived'), 'archived');
});

test('copy with options', async (t) => {
	await start(t, sleeper().withCopyContentToContainer([{content: 'x', target: '/tmp/x'}]).withCopyToContainerOptions({copyUIDGID: true, noOverwriteDirNonDir: true}));
});

test('copy from a container', async (t) => {
	const c = await start(t, sleeper());
	const extract = tar.extract();
	const names = [];
	extract.on('entry', (header, stream, next) => { names.push(header.name); stream.resume(); stream.on('end', next); });
	const ended = new Promise((resolve, reject) => { extract.on('finish', resolve); extract.on('error', reject); });
	(await c.copyArchiveFromContainer('/etc/passwd')).pipe(extract);
	await ended;
	assert.deepEqual(names, ['passwd']);
});

test('exec', async (t) => {
	const c = await start(t, sleeper());
	const got = await c.exec(['sh', '-c', 'echo out; echo err >&2; exit 3']);
	assert.deepEqual([got.exitCode, got.stdout, got.stderr], [3, 'out\n', 'err\n']);
});

test('exec with options', async (t) => {
	const c = await start(t, sleeper());
	const got = await c.exec(['sh', '-c', 'echo $A $PWD $(id -u)'], {env: {A: 'b'}, workingDir: '/tmp', user: '1000'});
	assert.equal(got.output, 'b /tmp 1000\n');
});

test('logs', async (t) => {
	const c = await start(t, sleeper());
	await lines(await c.logs(), 'ready');
	await lines(await c.logs({since: 0, tail: 1}), 'ready');
});

test('log consumer', async (t) => {
	const seen = new Promise((resolve) => {
		t.consumer = (stream) => stream.on('data', (line) => { if (String(line).includes('ready')) resolve(); });
	});
	await start(t, sleeper().withLogConsumer(t.consumer));
	await seen;
});

test('restart', async (t) => {
	const c = await start(t, server());
	const id = c.getId();
	await c.restart({timeout: 0});
	assert.equal(c.getId(), id);
	assert.equal(await get(c), 'hello\n');
});

test('stop without removing', async () => {
	const c = await sleeper().withAutoRemove(false).start();
	const stopped = await c.stop({timeout: 0, remove: false});
	assert.equal(stopped.getId(), c.getId());
	await stopped.copyArchiveFromContainer('/etc/passwd').then((s) => s.resume());
	const client = await getContainerRuntimeClient();
	await client.container.remove(client.container.getById(c.getId()), {removeVolumes: true});
});

test('commit', async (t) => {
	const c = await start(t, sleeper());
	const id = await c.commit({repo: 'langs.local/node/committed', tag: 'one', changes: ['LABEL a=b', 'ENV A=b']});
	assert.match(id, /^sha256:/);
	const client = await getContainerRuntimeClient();
	t.after(() => client.container.dockerode.getImage('langs.local/node/committed:one').remove({force: true}));
});

test('commit with a changed command', async (t) => {
	const c = await start(t, sleeper());
	await c.commit({repo: 'langs.local/node/committed', tag: 'two', author: 'a', comment: 'c', pause: true, changes: ['CMD ["echo", "hi"]']});
	const client = await getContainerRuntimeClient();
	t.after(() => client.container.dockerode.getImage('langs.local/node/committed:two').remove({force: true}));
});

test('network with aliases', async (t) => {
	const network = await new Network().start();
	t.after(() => network.stop());
	const a = await start(t, server().withNetwork(network).withNetworkAliases('web'));
	const b = await start(t, sleeper().withNetwork(network));
	assert.equal((await b.exec('wget -q -O - http://web:8080/')).output, 'hello\n');
	assert.ok(a.getNetworkNames().includes(network.getName()));
	assert.ok(b.getIpAddress(network.getName()));
	assert.equal(b.getNetworkId(network.getName()), network.getId());
});

test('network by its mode', async (t) => {
	const network = await new Network().start();
	t.after(() => network.stop());
	const c = await start(t, sleeper().withNetworkMode(network.getName()));
	assert.deepEqual(c.getNetworkNames(), [network.getName()]);
});

test('reuse', async (t) => {
	const name = unique('reuse');
	const one = await start(t, sleeper().withName(name).withReuse());
	const two = await sleeper().withName(name).withReuse().start();
	assert.equal(two.getId(), one.getId());
});

test('reuse of a stopped one', async (t) => {
	const name = unique('reuse');
	const one = await sleeper().withName(name).withReuse().withAutoRemove(false).start();
	await one.stop({timeout: 0, remove: false});
	const two = await start(t, sleeper().withName(name).withReuse());
	assert.equal(two.getId(), one.getId());
});

const dockerfile = (...more) => [`FROM ${image}`, ...more, 'CMD ["sh", "-c", "echo ready; sleep 300"]'].join('\n');

const build = async (t, dir, change = (b) => b) => {
	const name = `langs.local/node/${unique('i')}:one`;
	const c = await change(GenericContainer.fromDockerfile(dir)).build(name, {deleteOnExit: false});
	const client = await getContainerRuntimeClient();
	t.after(() => client.container.dockerode.getImage(name).remove({force: true}));
	return start(t, c.withWaitStrategy(Wait.forLogMessage('ready')));
};

test('build', async (t) => {
	const dir = temporary(t, {Dockerfile: dockerfile('COPY file /file'), file: 'built'});
	assert.equal(await read(await build(t, dir), '/file'), 'built');
});

test('build under a random name', async (t) => {
	const dir = temporary(t, {Dockerfile: dockerfile()});
	const c = await GenericContainer.fromDockerfile(dir).build();
	await start(t, c.withWaitStrategy(Wait.forLogMessage('ready')));
});

test('build with arguments', async (t) => {
	const dir = temporary(t, {Dockerfile: dockerfile('ARG A', 'RUN echo $A > /a')});
	const c = await build(t, dir, (b) => b.withBuildArgs({A: 'argument'}).withCache(false));
	assert.equal(await read(c, '/a'), 'argument\n');
});

test('build with a target and an ignore file', async (t) => {
	const dir = temporary(t, {Dockerfile: dockerfile().replace('FROM ' + image, `FROM ${image} AS one`) + `\nFROM ${image}\nRUN false\n`, '.dockerignore': 'ignored', ignored: 'x'});
	await build(t, dir, (b) => b.withTarget('one').withPlatform('linux/amd64'));
});

const compose = () => new DockerComposeEnvironment(path.join(__dirname, 'compose'), 'compose.yaml').withStartupTimeout(30000);

test('compose', async () => {
	const up = await compose().withWaitStrategy('web-1', Wait.forListeningPorts()).withWaitStrategy('worker-1', Wait.forHealthCheck()).up();
	try {
		const c = up.getContainer('web-1');
		assert.match(await get(c, '/passwd'), /root/);
		await lines(await up.getContainer('worker-1').logs(), 'working');
	} finally {
		await up.down({removeVolumes: true, timeout: 0});
	}
});

test('compose with environment and services', async () => {
	const up = await compose().withEnvironment({GREETING: 'hello'}).withNoRecreate().withProjectName(unique('p')).up(['web']);
	try {
		assert.equal((await up.getContainer('web-1').exec(['sh', '-c', 'echo $GREETING'])).output, 'hello\n');
	} finally {
		await up.down({timeout: 0});
	}
});

test('compose stop', async () => {
	const up = await compose().up(['worker']);
	const stopped = await up.stop();
	await stopped.down({removeVolumes: true});
});

main();
