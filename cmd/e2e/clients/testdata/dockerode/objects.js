// Cases of images, networks, volumes, events and the system.
'use strict';

const assert = require('node:assert');
const fs = require('node:fs');
const zlib = require('node:zlib');
const {test, unique} = require('../tap.js');
const {build, collect, context, create, docker, Docker, image, network, progress, run, volume} = require('./fixture.js');

const registry = process.env.REGISTRY;
const dockerfile = (...lines) => [`FROM ${image}`, ...lines].join('\n');
const tagged = (name) => `langs.local/node/${name}:one`;

test('ping', async () => {
	assert.equal((await docker.ping()).toString(), 'OK');
});

test('version', async () => {
	const got = await docker.version();
	assert.ok(got.Version && got.ApiVersion && got.MinAPIVersion);
});

test('info', async () => {
	const got = await docker.info();
	for (const key of ['ID', 'Containers', 'Images', 'Driver', 'NCPU', 'MemTotal', 'Swarm', 'Plugins', 'RegistryConfig', 'OSType']) assert.ok(key in got, key);
});

test('df', async () => {
	const got = await docker.df();
	for (const key of ['LayersSize', 'Images', 'Containers', 'Volumes', 'BuildCache']) assert.ok(key in got, key);
});

test('df of types', async () => {
	assert.ok('Containers' in await docker.df({types: ['container']}));
});

test('client of a version', async () => {
	const {ApiVersion} = await docker.version();
	assert.ok(await new Docker({version: 'v' + ApiVersion}).listContainers());
});

test('client of an address', async () => {
	const socketPath = process.env.DOCKER_HOST.replace('unix://', '');
	assert.ok(await new Docker({socketPath}).info());
});

test('checkAuth by the name of the registry', async () => {
	if (!registry) return;
	const got = await docker.checkAuth({username: 'u', password: 'p', email: 'a@b', serveraddress: registry});
	assert.equal(got.Status, 'Login Succeeded');
});

test('checkAuth [policy]', async () => {
	if (!registry) return;
	const got = await docker.checkAuth({username: 'u', password: 'p', email: 'a@b', serveraddress: `http://${registry}/v2`});
	assert.equal(got.Status, 'Login Succeeded');
});

const nextEvent = (stream, match) => new Promise((resolve) => {
	let rest = '';
	stream.on('data', (b) => {
		rest += b;
		const lines = rest.split('\n');
		rest = lines.pop();
		const found = lines.filter(Boolean).map((l) => JSON.parse(l)).find(match);
		if (found) resolve(found);
	});
});

test('events', async (t) => {
	const stream = await docker.getEvents();
	t.after(() => stream.destroy());
	const event = nextEvent(stream, (e) => e.Action === 'create');
	const c = await create(t);
	assert.equal((await event).Actor.ID, c.id);
});

test('events with filters', async (t) => {
	const stream = await docker.getEvents({filters: {type: ['container'], event: ['start', 'die']}});
	t.after(() => stream.destroy());
	const event = nextEvent(stream, () => true);
	const c = await run(t);
	assert.deepEqual([(await event).Action, (await event).Actor.ID], ['start', c.id]);
});

test('events of the past', async (t) => {
	const since = Math.floor(Date.now() / 1000) - 1;
	const c = await create(t);
	const stream = await docker.getEvents({since, until: since + 3, filters: JSON.stringify({container: [c.id]})});
	assert.match((await collect(stream)).toString(), /"create"/);
});

test('events with an abort signal', async () => {
	const abort = new AbortController();
	const stream = await docker.getEvents({since: 0, abortSignal: abort.signal});
	stream.on('error', () => {});
	abort.abort();
});

test('images', async () => {
	assert.ok((await docker.listImages()).some((i) => (i.RepoTags || []).includes(image)));
});

test('images with options', async () => {
	assert.ok((await docker.listImages({all: true, digests: true})).length > 0);
	assert.ok((await docker.listImages({filters: {reference: [image]}})).length > 0);
	assert.ok((await docker.listImages({filters: '{"dangling": ["false"]}'})).length > 0);
});

test('images with manifests', async () => {
	assert.ok((await docker.listImages({manifests: true, 'shared-size': true})).length > 0);
});

test('image inspect', async () => {
	assert.match((await docker.getImage(image).inspect()).Id, /^sha256:/);
});

test('image inspect of a missing one', async () => {
	await assert.rejects(docker.getImage('langs/missing').inspect(), (e) => e.statusCode === 404 && e.reason === 'no such image');
});

test('image history', async () => {
	assert.ok((await docker.getImage(image).history()).length > 0);
});

test('image get', async () => {
	assert.ok((await collect(await docker.getImage(image).get())).includes('manifest.json'));
});

test('images get', async () => {
	assert.ok((await collect(await docker.getImages({names: [image]}))).includes('manifest.json'));
});

test('image tag', async (t) => {
	t.after(() => docker.getImage(tagged('tag')).remove());
	await docker.getImage(image).tag({repo: 'langs.local/node/tag', tag: 'one'});
	assert.ok((await docker.getImage(image).inspect()).RepoTags.includes(tagged('tag')));
});

test('image tag by force', async (t) => {
	t.after(() => docker.getImage('langs.local/node/tag:two').remove());
	await docker.getImage(image).tag({repo: 'langs.local/node/tag', tag: 'two', force: 1});
});

test('image remove', async (t) => {
	await build(t, await context({Dockerfile: dockerfile('RUN echo node > /x')}), tagged('remove'));
	const got = await docker.getImage(tagged('remove')).remove({force: true, noprune: false});
	assert.ok(got.some((x) => x.Untagged === tagged('remove')));
});

test('image load', async (t) => {
	await build(t, await context({Dockerfile: dockerfile('RUN echo load > /x')}), tagged('load'));
	const data = await collect(await docker.getImage(tagged('load')).get());
	await docker.getImage(tagged('load')).remove({force: true});
	const {Readable} = require('node:stream');
	await progress(await docker.loadImage(Readable.from([data]), {}));
	await docker.getImage(tagged('load')).inspect();
});

test('image load, quietly', async (t) => {
	await build(t, await context({Dockerfile: dockerfile('RUN echo quiet > /x')}), tagged('quiet'));
	const data = await collect(await docker.getImage(tagged('quiet')).get());
	await progress(await docker.loadImage(data, {quiet: true}));
});

test('image import', async (t) => {
	t.after(() => docker.getImage(tagged('import')).remove({force: true}));
	await progress(await docker.importImage(await context({x: 'x'}), {repo: 'langs.local/node/import', tag: 'one'}));
});

test('images prune', async () => {
	assert.ok('SpaceReclaimed' in await docker.pruneImages({filters: {dangling: {true: true}}}));
});

test('builds prune', async () => {
	assert.ok('SpaceReclaimed' in await docker.pruneBuilder());
});

test('build from a buffer', async (t) => {
	const lines = await build(t, await context({Dockerfile: dockerfile('COPY a /a'), a: 'a'}), tagged('buffer'));
	assert.ok(lines.some((l) => (l.stream || '').includes('Successfully built')));
});

test('build from a file', async (t) => {
	const dir = fs.mkdtempSync('/tmp/dockerode-');
	t.after(() => fs.rmSync(dir, {recursive: true}));
	fs.writeFileSync(dir + '/context.tar', await context({Dockerfile: dockerfile()}));
	await build(t, dir + '/context.tar', tagged('file'));
});

test('build from gzip', async (t) => {
	await build(t, zlib.gzipSync(await context({Dockerfile: dockerfile('RUN true')})), tagged('gzip'));
});

const directory = async (t, files) => {
	const dir = fs.mkdtempSync('/tmp/dockerode-');
	t.after(() => fs.rmSync(dir, {recursive: true}));
	for (const [name, text] of Object.entries(files)) fs.writeFileSync(`${dir}/${name}`, text);
	return dir;
};

test('build from a directory', async (t) => {
	const dir = await directory(t, {Dockerfile: dockerfile('COPY a /a'), a: 'a', b: 'b', '.dockerignore': 'b'});
	await build(t, {context: dir, src: ['Dockerfile', 'a', '.dockerignore']}, tagged('directory'));
});

test('build with options', async (t) => {
	const file = await context({Other: dockerfile('ARG A', 'RUN echo $A', 'LABEL a=b')});
	await build(t, file, tagged('options'), {
		dockerfile: 'Other', buildargs: {A: 'b'}, labels: {k: 'v'}, nocache: true, rm: true, forcerm: true, pull: '', q: false,
		memory: 128 << 20, memswap: 128 << 20, cpushares: 100, networkmode: 'none', platform: '',
	});
	assert.equal((await docker.getImage(tagged('options')).inspect()).Config.Labels.k, 'v');
});

test('build with a target', async (t) => {
	await build(t, await context({Dockerfile: `FROM ${image} AS one\nRUN true\nFROM ${image}\nRUN false`}), tagged('target'), {target: 'one'});
});

test('build with cachefrom', async (t) => {
	const file = await context({Dockerfile: dockerfile('RUN echo cache')});
	await build(t, file, tagged('cache'));
	await build(t, file, tagged('cache2'), {cachefrom: JSON.stringify([tagged('cache')])});
});

test('build with an empty registry configuration', async (t) => {
	await build(t, await context({Dockerfile: dockerfile('RUN true')}), tagged('config'), {registryconfig: {}});
});

test('build that fails', async (t) => {
	await assert.rejects(build(t, await context({Dockerfile: dockerfile('RUN exit 3')}), tagged('fails')), /non-zero code: 3/);
});

test('push and pull', async (t) => {
	if (!registry) return;
	const name = `${registry}/node/pushed:one`;
	await build(t, await context({Dockerfile: dockerfile('RUN echo pushed > /x')}), name);
	await progress(await docker.getImage(`${registry}/node/pushed`).push({tag: 'one', authconfig: {username: 'u', password: 'p'}}));
	await docker.getImage(name).remove({force: true});
	await progress(await docker.pull(name));
	await docker.getImage(name).inspect();
});

test('pull with authentication', async (t) => {
	if (!registry) return;
	const name = `${registry}/node/auth:one`;
	await build(t, await context({Dockerfile: dockerfile('RUN echo auth > /x')}), name);
	await progress(await docker.getImage(name).push({authconfig: {username: 'u', password: 'p'}}));
	await progress(await docker.pull(name, {authconfig: {username: 'u', password: 'p', serveraddress: registry}}));
});

test('createImage', async (t) => {
	if (!registry) return;
	const name = `${registry}/node/created`;
	await build(t, await context({Dockerfile: dockerfile('RUN echo created > /x')}), name + ':one');
	await progress(await docker.getImage(name).push({tag: 'one'}));
	await docker.getImage(name + ':one').remove({force: true});
	await progress(await docker.createImage({fromImage: name, tag: 'one'}));
	await progress(await docker.createImage({}, {fromImage: name + ':one'}));
});

test('pull of a missing image', async () => {
	await assert.rejects(async () => progress(await docker.pull(`${registry || 'localhost:1'}/node/missing:one`)));
});

test('distribution', async (t) => {
	if (!registry) return;
	const name = `${registry}/node/distribution:one`;
	await build(t, await context({Dockerfile: dockerfile('RUN echo distribution > /x')}), name);
	await progress(await docker.getImage(name).push({authconfig: {username: 'u', password: 'p'}}));
	assert.ok((await docker.getImage(name).distribution()).Descriptor.digest);
});

test('network create', async (t) => {
	const n = await network(t, {Driver: 'bridge', Labels: {k: 'v'}, CheckDuplicate: true, Internal: false, EnableIPv6: false, Attachable: false, Ingress: false, Options: {}, IPAM: {Driver: 'default', Config: []}});
	const got = await n.inspect();
	assert.deepEqual([got.Driver, got.Labels], ['bridge', {k: 'v'}]);
});

test('network create with a subnet', async (t) => {
	const n = await network(t, {IPAM: {Driver: 'default', Config: [{Subnet: '10.199.9.0/24', IPRange: '10.199.9.0/25', Gateway: '10.199.9.1'}]}});
	assert.equal((await n.inspect()).IPAM.Config[0].Subnet, '10.199.9.0/24');
});

test('network inspect with options', async (t) => {
	const n = await network(t);
	assert.equal((await n.inspect({verbose: true, scope: 'local'})).Id, n.id);
});

test('network inspect of bridge', async () => {
	assert.equal((await docker.getNetwork('bridge').inspect()).Name, 'bridge');
});

test('network inspect of a missing one', async () => {
	await assert.rejects(docker.getNetwork('missing').inspect(), {statusCode: 404});
});

test('networks', async (t) => {
	const n = await network(t, {Labels: {list: 'me'}});
	assert.ok((await docker.listNetworks()).some((x) => x.Id === n.id));
	assert.deepEqual((await docker.listNetworks({filters: {label: ['list=me']}})).map((x) => x.Id), [n.id]);
});

test('networks have the predefined ones', async () => {
	const names = (await docker.listNetworks({})).map((n) => n.Name);
	for (const name of ['bridge', 'host', 'none']) assert.ok(names.includes(name), name);
});

test('network connect and disconnect', async (t) => {
	const n = await network(t);
	const c = await run(t);
	await n.connect({Container: c.id, EndpointConfig: {Aliases: ['alias']}});
	assert.ok((await c.inspect()).NetworkSettings.Networks[(await n.inspect()).Name]);
	await n.disconnect({Container: c.id, Force: true});
});

test('networks prune', async (t) => {
	const n = await docker.createNetwork({Name: unique('n'), Labels: {prune: 'me'}});
	t.after(() => n.remove());
	assert.equal((await docker.pruneNetworks({filters: {label: ['prune=me']}})).NetworksDeleted.length, 1);
});

test('volume create', async (t) => {
	const v = await volume(t, {Driver: 'local', DriverOpts: {}, Labels: {k: 'v'}});
	const got = await docker.getVolume(v.name).inspect();
	assert.deepEqual([got.Driver, got.Labels], ['local', {k: 'v'}]);
});

test('volume create without a name', async (t) => {
	const v = await volume(t, {Name: ''});
	assert.equal(v.name.length, 64);
});

test('volumes', async (t) => {
	const v = await volume(t, {Labels: {list: 'me'}});
	assert.ok((await docker.listVolumes()).Volumes.some((x) => x.Name === v.name));
	assert.deepEqual((await docker.listVolumes({filters: {label: ['list=me']}})).Volumes.map((x) => x.Name), [v.name]);
});

test('volume remove', async (t) => {
	const v = await volume(t);
	await docker.getVolume(v.name).remove();
	await assert.rejects(docker.getVolume(v.name).inspect(), {statusCode: 404});
});

test('volumes prune', async (t) => {
	await volume(t);
	assert.ok('VolumesDeleted' in await docker.pruneVolumes());
});
