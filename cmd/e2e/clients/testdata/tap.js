// Runs functions as test cases and prints TAP.
'use strict';

const crypto = require('node:crypto');

const cases = [];

// test registers a case. Its function gets an object whose after(f) undoes at the end.
exports.test = (name, run) => cases.push({name, run});

exports.sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

exports.unique = (kind) => `js-${kind}-${crypto.randomBytes(5).toString('hex')}`;

exports.until = async (what, holds) => {
	for (let i = 0; i < 100; i++) {
		if (await holds()) return;
		await exports.sleep(100);
	}
	throw new Error(`never: ${what}`);
};

exports.main = async (limit = 45000) => {
	const wanted = new RegExp(process.env.CASES || '');
	const chosen = cases.filter((c) => wanted.test(c.name));
	let number = 0;
	let failed = 0;
	for (const c of chosen) {
		const undo = [];
		let reason = '';
		let timer;
		const late = new Promise((_, reject) => {
			timer = setTimeout(() => reject(new Error('the case takes too long')), limit);
		});
		const unexpected = new Promise((_, reject) => {
			process.removeAllListeners('uncaughtException');
			process.removeAllListeners('unhandledRejection');
			process.on('uncaughtException', reject);
			process.on('unhandledRejection', reject);
		});
		late.catch(() => {});
		unexpected.catch(() => {});
		try {
			await Promise.race([c.run({after: (f) => undo.push(f)}), late, unexpected]);
		} catch (e) {
			reason = `${e.statusCode || ''} ${e.message || e}`;
		}
		clearTimeout(timer);
		for (const f of undo.reverse()) {
			try {
				await Promise.race([f(), exports.sleep(20000)]);
			} catch {
				// It may be gone.
			}
		}
		number++;
		failed += reason ? 1 : 0;
		const line = reason ? `not ok ${number} - ${c.name} # ${reason.replace(/\s+/g, ' ').trim().slice(0, 600)}` : `ok ${number} - ${c.name}`;
		process.stdout.write(line + '\n');
	}
	process.stdout.write(`1..${chosen.length}\n`);
	process.exit(failed ? 1 : 0);
};
