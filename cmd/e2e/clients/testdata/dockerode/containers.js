// Cases of containers and execs.
'use strict';

const assert = require('node:assert');
const {PassThrough} = require('node:stream');
const tar = require('tar-stream');
const {test, unique, until} = require('../tap.js');
const {collect, context, create, demux, docker, image, network, run, volume} = require('./fixture.js');

test('container create', async (t) => {
	const c = await create(t);
	assert.match(c.id, /^[0-9a-f]{64}$/);
});

test('container create with a callback', (t) => new Promise((resolve, reject) => {
	docker.createContainer({Image: image, Cmd: ['true'], name: unique('c')}, (err, c) => {
		if (err) return reject(err);
		t.after(() => c.remove({force: true}));
		resolve();
	});
}));

test('container create with query and body', async (t) => {
	const name = unique('c');
	const c = await docker.createContainer({_query: {name}, _body: {Image: image, Cmd: ['true']}});
	t.after(() => c.remove({force: true}));
	assert.equal((await c.inspect()).Name, '/' + name);
});

test('container create with much', async (t) => {
	const v = await volume(t);
	const n = await network(t);
	const c = await create(t, {
		AttachStdin: false, AttachStdout: true, AttachStderr: true, Tty: true, OpenStdin: false, StdinOnce: false,
		Env: ['A=b'], Labels: {k: 'v'}, WorkingDir: '/tmp', User: '1000', ExposedPorts: {'80/tcp': {}}, Volumes: {'/anonymous': {}},
		StopSignal: 'SIGINT', StopTimeout: 5, Hostname: 'h', Domainname: 'd', Entrypoint: [],
		HostConfig: {
			Binds: [`${v.name}:/data`], NetworkMode: n.id, PortBindings: {'80/tcp': [{HostIp: '127.0.0.1', HostPort: ''}]}, Memory: 64 << 20,
			RestartPolicy: {Name: 'on-failure', MaximumRetryCount: 2}, AutoRemove: false, CapDrop: ['ALL'], ReadonlyRootfs: false,
			LogConfig: {Type: 'json-file', Config: {}}, Ulimits: [{Name: 'nofile', Soft: 100, Hard: 200}], Tmpfs: {'/mem': ''}, Init: true,
		},
		NetworkingConfig: {EndpointsConfig: {[n.id]: {Aliases: ['alias']}}},
	});
	const got = await c.inspect();
	assert.equal(got.Config.Labels.k, 'v');
	await c.start();
});

test('container create with odd keys', async (t) => {
	await create(t, {VolumesFrom: [], Dns: null, HostConfig: {LxcConf: [], Privileged: false, Links: [], VolumesFrom: []}});
});

test('container create fails without an image', async () => {
	await assert.rejects(docker.createContainer({Image: 'langs/missing', Cmd: ['true']}), {statusCode: 404});
});

test('container create with a platform', async (t) => {
	await create(t, {platform: 'linux/amd64'});
});

test('container inspect', async (t) => {
	const c = await create(t, {Labels: {k: 'v'}});
	const got = await c.inspect();
	assert.equal(got.Id, c.id);
	assert.deepEqual(got.Config.Labels, {k: 'v'});
});

test('container inspect with size', async (t) => {
	const got = await (await create(t)).inspect({size: true});
	assert.ok('SizeRootFs' in got);
});

test('container inspect of a missing one', async () => {
	await assert.rejects(docker.getContainer('missing').inspect(), (e) => e.statusCode === 404 && e.reason === 'no such container');
});

test('container start and stop', async (t) => {
	const c = await create(t, {StopSignal: 'SIGKILL'});
	await c.start();
	await c.stop();
	assert.equal((await c.inspect()).State.Running, false);
});

test('container start with options', async (t) => {
	const c = await create(t);
	await c.start({});
	await c.stop({t: 0});
});

test('container start twice', async (t) => {
	const c = await run(t);
	await assert.rejects(c.start(), {statusCode: 304});
});

test('container restart', async (t) => {
	const c = await run(t);
	await c.restart({t: 0});
	assert.equal((await c.inspect()).State.Running, true);
});

test('container kill', async (t) => {
	const c = await run(t);
	await c.kill({signal: 'SIGKILL'});
	await c.wait();
	assert.equal((await c.inspect()).State.ExitCode, 137);
});

test('container kill without options', async (t) => {
	await (await run(t)).kill();
});

test('container pause and unpause', async (t) => {
	const c = await run(t);
	await c.pause();
	assert.equal((await c.inspect()).State.Paused, true);
	await c.unpause();
});

test('container rename', async (t) => {
	const c = await create(t);
	const name = unique('c');
	await c.rename({name});
	assert.equal((await c.inspect()).Name, '/' + name);
});

test('container update', async (t) => {
	const c = await create(t, {HostConfig: {Memory: 128 << 20}});
	await c.update({Memory: 64 << 20, MemorySwap: 64 << 20, CpuShares: 512});
	assert.equal((await c.inspect()).HostConfig.Memory, 64 << 20);
});

test('container top', async (t) => {
	const got = await (await run(t)).top({ps_args: '-o pid,cmd'});
	assert.deepEqual(got.Titles, ['PID', 'CMD']);
});

test('container top without options', async (t) => {
	assert.ok((await (await run(t)).top()).Processes.length > 0);
});

test('container changes', async (t) => {
	const c = await run(t, {Cmd: ['touch', '/new']});
	await c.wait();
	assert.ok((await c.changes()).some((x) => x.Path === '/new'));
});

test('container export', async (t) => {
	assert.ok((await collect(await (await create(t)).export())).length > 1024);
});

test('container wait', async (t) => {
	const c = await run(t, {Cmd: ['sh', '-c', 'exit 3']});
	assert.equal((await c.wait()).StatusCode, 3);
});

test('container wait with a condition', async (t) => {
	const c = await create(t, {Cmd: ['true']});
	const waits = c.wait({condition: 'next-exit'});
	await c.start();
	assert.equal((await waits).StatusCode, 0);
});

test('container remove', async (t) => {
	const c = await run(t);
	await assert.rejects(c.remove(), (e) => e.statusCode === 409 || e.statusCode === 500);
	await c.remove({force: true, v: true, link: false});
	await assert.rejects(c.inspect(), {statusCode: 404});
});

test('container logs', async (t) => {
	const c = await run(t, {Cmd: ['sh', '-c', 'echo out; echo err >&2']});
	await c.wait();
	const logs = await c.logs({stdout: true, stderr: true, follow: false});
	assert.ok(logs.includes('out') && logs.includes('err'));
});

test('container logs followed', async (t) => {
	const c = await run(t, {Cmd: ['sh', '-c', 'for i in 1 2 3; do echo $i; done; echo e >&2']});
	const [out, err] = await demux(await c.logs({follow: true, stdout: true, stderr: true}));
	assert.deepEqual([out, err], ['1\n2\n3\n', 'e\n']);
});

test('container logs with all options', async (t) => {
	const c = await run(t, {Cmd: ['echo', 'a']});
	await c.wait();
	const now = Math.floor(Date.now() / 1000);
	const logs = await c.logs({stdout: 1, stderr: 0, follow: 0, timestamps: 1, tail: 10, since: now - 100, until: now + 100});
	assert.match(logs.toString(), /Z a\n/);
});

test('container logs with an abort signal', async (t) => {
	const c = await run(t, {Cmd: ['sh', '-c', 'while :; do echo x; sleep 0.1; done']});
	const abort = new AbortController();
	const stream = await c.logs({follow: true, stdout: true, abortSignal: abort.signal});
	await new Promise((resolve) => stream.once('data', resolve));
	stream.on('error', () => {});
	abort.abort();
});

test('container stats', async (t) => {
	const c = await run(t);
	const stream = await c.stats();
	const first = JSON.parse((await new Promise((resolve) => stream.once('data', resolve))).toString());
	stream.destroy();
	assert.ok(first.cpu_stats);
});

test('container stats once', async (t) => {
	const got = await (await run(t)).stats({stream: false});
	assert.ok(got.memory_stats.usage > 0);
});

test('container stats at once', async (t) => {
	assert.ok((await (await run(t)).stats({stream: false, 'one-shot': true})).cpu_stats);
});

test('container attach', async (t) => {
	const c = await create(t, {Cmd: ['sh', '-c', 'echo out; echo err >&2'], AttachStdout: true, AttachStderr: true});
	const stream = await c.attach({stream: true, stdout: true, stderr: true});
	const got = demux(stream);
	await c.start();
	assert.deepEqual(await got, ['out\n', 'err\n']);
});

test('container attach with a TTY', async (t) => {
	const c = await create(t, {Cmd: ['echo', 'a'], Tty: true, AttachStdout: true});
	const got = collect(await c.attach({stream: true, stdout: true, stderr: true, tty: true}));
	await c.start();
	assert.equal((await got).toString(), 'a\r\n');
});

test('container attach with hijack', async (t) => {
	const c = await create(t, {Cmd: ['cat'], OpenStdin: true, StdinOnce: true, AttachStdin: true, AttachStdout: true});
	const stream = await c.attach({stream: true, stdin: true, stdout: true, stderr: true, hijack: true});
	await c.start();
	const got = demux(stream);
	stream.write('ping\n');
	stream.end();
	assert.equal((await got)[0], 'ping\n');
});

test('container attach without hijack', async (t) => {
	const c = await create(t, {Cmd: ['head', '-c', '5'], OpenStdin: true, StdinOnce: true, AttachStdin: true, AttachStdout: true});
	const stream = await c.attach({stream: true, stdin: true, stdout: true, stderr: true});
	await c.start();
	const got = demux(stream);
	stream.write('ping\n');
	assert.equal((await got)[0], 'ping\n');
});

test('container attach with logs', async (t) => {
	const c = await run(t, {Cmd: ['echo', 'a']});
	await c.wait();
	const stream = await c.attach({logs: true, stream: false, stdout: true, stderr: true, detachKeys: 'ctrl-c'});
	assert.ok(stream);
	stream.destroy();
});

test('container resize', async (t) => {
	await (await run(t, {Tty: true, Cmd: ['sh'], OpenStdin: true})).resize({h: 40, w: 120});
});

test('container put archive', async (t) => {
	const c = await create(t, {Cmd: ['cat', '/tmp/file']});
	await c.putArchive(await context({file: 'data'}), {path: '/tmp'});
	await c.start();
	await c.wait();
	assert.match((await c.logs({stdout: true})).toString(), /data/);
});

test('container put archive with options', async (t) => {
	const c = await create(t);
	await c.putArchive(await context({file: 'data'}), {path: '/tmp', noOverwriteDirNonDir: true, copyUIDGID: false});
});

test('container put archive as a stream', async (t) => {
	const c = await create(t);
	const pack = tar.pack();
	pack.entry({name: 'file'}, 'data');
	pack.finalize();
	await c.putArchive(pack, {path: '/tmp'});
});

test('container put archive of a file', async (t) => {
	const fs = require('node:fs');
	const dir = fs.mkdtempSync('/tmp/dockerode-');
	t.after(() => fs.rmSync(dir, {recursive: true}));
	fs.writeFileSync(dir + '/a.tar', await context({file: 'data'}));
	await (await create(t)).putArchive(dir + '/a.tar', {path: '/tmp'});
});

test('container get archive', async (t) => {
	const data = await collect(await (await create(t)).getArchive({path: '/etc/passwd'}));
	assert.ok(data.includes('root'));
});

test('container info archive', async (t) => {
	const response = await (await create(t)).infoArchive({path: '/etc/passwd'});
	assert.ok(response);
});

test('container commit', async (t) => {
	const c = await run(t, {Cmd: ['touch', '/x']});
	await c.wait();
	t.after(() => docker.getImage('langs.local/node/commit:one').remove({force: true}));
	const got = await c.commit({repo: 'langs.local/node/commit', tag: 'one', comment: 'c', author: 'a', pause: true});
	assert.match(got.Id, /^sha256:/);
});

test('container list', async (t) => {
	const c = await run(t, {Labels: {mine: c1}});
	assert.ok((await docker.listContainers()).some((x) => x.Id === c.id));
	assert.ok((await docker.listContainers({all: 1})).some((x) => x.Id === c.id));
	assert.ok((await docker.listContainers({all: true, limit: 10, size: true})).some((x) => x.Id === c.id));
	assert.deepEqual((await docker.listContainers({filters: {label: ['mine=' + c1]}})).map((x) => x.Id), [c.id]);
	assert.deepEqual((await docker.listContainers({filters: JSON.stringify({label: ['mine=' + c1]})})).map((x) => x.Id), [c.id]);
	assert.deepEqual((await docker.listContainers({filters: {label: ['mine=' + c1]}}))[0].Labels, {mine: c1});
});

const c1 = unique('l');

test('container prune', async (t) => {
	const c = await create(t, {Labels: {prune: 'me'}});
	const got = await docker.pruneContainers({filters: {label: ['prune=me']}});
	assert.deepEqual(got.ContainersDeleted, [c.id]);
});

test('container auto-removed', async (t) => {
	const c = await create(t, {Cmd: ['true'], HostConfig: {AutoRemove: true}});
	await c.start();
	await until('it is gone', () => c.inspect().then(() => false, (e) => e.statusCode === 404));
});

const started = async (t, options, startOptions) => {
	const c = await run(t);
	const e = await c.exec({Cmd: ['sh', '-c', 'echo out; echo err >&2'], AttachStdout: true, AttachStderr: true, ...options});
	return {exec: e, stream: await e.start(startOptions)};
};

test('exec', async (t) => {
	const {stream} = await started(t);
	assert.deepEqual(await demux(stream), ['out\n', 'err\n']);
});

test('exec with options of start', async (t) => {
	const {stream} = await started(t, {}, {Detach: false, Tty: false});
	assert.deepEqual(await demux(stream), ['out\n', 'err\n']);
});

test('exec with hijack', async (t) => {
	const {stream} = await started(t, {Cmd: ['cat'], AttachStdin: true}, {hijack: true, stdin: true});
	const got = demux(stream);
	stream.write('ping\n');
	stream.end();
	assert.equal((await got)[0], 'ping\n');
});

test('exec with stdin and without hijack', async (t) => {
	const {stream} = await started(t, {Cmd: ['head', '-c', '5'], AttachStdin: true}, {stdin: true});
	const got = demux(stream);
	stream.write('ping\n');
	assert.equal((await got)[0], 'ping\n');
});

test('exec with a TTY', async (t) => {
	const {stream} = await started(t, {Cmd: ['echo', 'a'], Tty: true}, {Tty: true});
	assert.match((await collect(stream)).toString(), /a\r\n/);
});

test('exec with hijack and a TTY, resized', async (t) => {
	const {exec, stream} = await started(t, {Cmd: ['sh'], Tty: true, AttachStdin: true}, {hijack: true, stdin: true, Tty: true});
	await exec.resize({h: 30, w: 100});
	const got = collect(stream);
	stream.write('stty size; exit\n');
	assert.match((await got).toString(), /30 100/);
});

test('exec detached', async (t) => {
	const c = await run(t);
	const e = await c.exec({Cmd: ['touch', '/x']});
	await e.start({Detach: true});
	await until('it ran', async () => !(await e.inspect()).Running);
});

test('exec inspect', async (t) => {
	const {exec, stream} = await started(t, {Cmd: ['sh', '-c', 'exit 3']});
	await demux(stream);
	await until('it ended', async () => !(await exec.inspect()).Running);
	assert.equal((await exec.inspect()).ExitCode, 3);
});

test('exec with all options', async (t) => {
	const {stream} = await started(t, {Cmd: ['sh', '-c', 'echo $A $PWD; id -u'], Env: ['A=b'], WorkingDir: '/tmp', User: '1000', Privileged: false, DetachKeys: ''});
	assert.equal((await demux(stream))[0], 'b /tmp\n1000\n');
});

test('exec in a container that does not run', async (t) => {
	await assert.rejects((await create(t)).exec({Cmd: ['true']}), {statusCode: 409});
});

test('run', async () => {
	const out = new PassThrough();
	const got = collect(out);
	const [data, container] = await docker.run(image, ['echo', 'hello'], out);
	await container.remove();
	assert.equal(data.StatusCode, 0);
	assert.equal((await got).toString(), 'hello\r\n');
});

test('run with two streams', async () => {
	const out = new PassThrough();
	const err = new PassThrough();
	const both = [collect(out), collect(err)];
	const [, container] = await docker.run(image, ['sh', '-c', 'echo out; echo err >&2'], [out, err], {Tty: false});
	await container.remove();
	assert.deepEqual((await Promise.all(both)).map(String), ['out\n', 'err\n']);
});

test('run with options of create and start', async () => {
	const [data, container] = await docker.run(image, ['sh', '-c', 'exit 4'], new PassThrough(), {Tty: false, Env: ['A=b'], HostConfig: {Memory: 64 << 20}}, {});
	await container.remove({v: true});
	assert.equal(data.StatusCode, 4);
});

test('run with a callback and events', () => new Promise((resolve, reject) => {
	const seen = [];
	const hub = docker.run(image, ['true'], null, {HostConfig: {AutoRemove: false}}, {}, (err, data, c) => {
		if (err) return reject(err);
		c.remove().then(() => seen.length === 4 ? resolve() : reject(new Error(seen)), reject);
	});
	for (const name of ['container', 'stream', 'start', 'data']) hub.on(name, () => seen.push(name));
}));

test('run removes by itself', async () => {
	const [, container] = await docker.run(image, ['true'], new PassThrough(), {HostConfig: {AutoRemove: true}});
	await until('it is gone', () => container.inspect().then(() => false, (e) => e.statusCode === 404));
});
