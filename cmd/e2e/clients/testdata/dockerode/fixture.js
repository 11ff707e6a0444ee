// What the cases share: a client, and what makes objects that a case's end removes.
'use strict';

const {PassThrough} = require('node:stream');
const Docker = require('dockerode');
const tar = require('tar-stream');
const {unique} = require('../tap.js');

const image = process.env.IMAGE;
const docker = new Docker(); // reads DOCKER_HOST

const collect = (stream) => new Promise((resolve, reject) => {
	const parts = [];
	stream.on('data', (b) => parts.push(Buffer.from(b)));
	stream.on('end', () => resolve(Buffer.concat(parts)));
	stream.on('close', () => resolve(Buffer.concat(parts)));
	stream.on('error', reject);
});

// demux splits a stream of both outputs.
const demux = async (stream) => {
	const out = new PassThrough();
	const err = new PassThrough();
	const both = [collect(out), collect(err)];
	docker.modem.demuxStream(stream, out, err);
	stream.on('end', () => { out.end(); err.end(); });
	stream.on('close', () => { out.end(); err.end(); });
	return (await Promise.all(both)).map(String);
};

const create = async (t, options = {}) => {
	const c = await docker.createContainer({Image: image, Cmd: ['sleep', '300'], name: unique('c'), ...options});
	t.after(() => c.remove({force: true, v: true}));
	return c;
};

const run = async (t, options) => {
	const c = await create(t, options);
	await c.start();
	return c;
};

const network = async (t, options = {}) => {
	const n = await docker.createNetwork({Name: unique('n'), ...options});
	t.after(() => n.remove());
	return n;
};

const volume = async (t, options = {}) => {
	const v = await docker.createVolume({Name: unique('v'), ...options});
	t.after(() => docker.getVolume(v.name || v.Name).remove({force: true}));
	return v;
};

// context is an archive of files, as a buffer.
const context = (files) => {
	const pack = tar.pack();
	for (const [name, text] of Object.entries(files)) pack.entry({name}, text);
	pack.finalize();
	return collect(pack);
};

const progress = (stream) => new Promise((resolve, reject) => {
	docker.modem.followProgress(stream, (err, lines) => {
		const failed = err || (lines.find((l) => l.error) || {}).error;
		failed ? reject(failed instanceof Error ? failed : new Error(failed)) : resolve(lines);
	});
});

const build = async (t, file, tag, options = {}) => {
	t.after(() => docker.getImage(tag).remove({force: true}));
	return progress(await docker.buildImage(file, {t: tag, ...options}));
};

module.exports = {build, collect, context, create, demux, docker, Docker, image, network, progress, run, volume};
