//! Work with a known result: primes, and a chain of hashes.

use std::{
    thread,
    time::{Duration, Instant},
};

use sha2::{Digest, Sha256};

use crate::{Result, cpus, report::Report, stop::Stop};

const PRIMES_BELOW: usize = 100_000;
const PRIMES: usize = 9592;
const LINKS: usize = 1000;
/// The end of the chain: SHA-256 of SHA-256 of … of 32 zero bytes, a thousand times.
const END_OF_CHAIN: [u8; 32] = [
    0x36, 0xc1, 0xcb, 0x4f, 0x82, 0x6a, 0xe4, 0x2c, 0xeb, 0xa8, 0x48, 0x22, 0x7e, 0x0c, 0x5f, 0x78, 0x61,
    0x78, 0xca, 0x9d, 0xce, 0xca, 0x67, 0x72, 0xe5, 0xd7, 0x28, 0xd0, 0x9c, 0x30, 0xa2, 0xf6,
];

#[derive(clap::Args)]
pub struct Args {
    /// Rest after each pass for this many times its length
    #[arg(long, default_value_t = 0.0)]
    rest: f64,
}

/// The longest rest, so that the workload ends soon on request.
const REST_MAX: Duration = Duration::from_millis(500);

/// Computes on each CPU.
pub fn run(args: &Args, stop: &Stop, report: &mut Report) -> Result<()> {
    cpus::on_each(stop, report, |cpu, stop, report| {
        while !stop.is_set() {
            let start = Instant::now();
            let primes = primes_below(PRIMES_BELOW);
            report.check(primes == PRIMES, || format!("CPU {cpu}: {primes} primes"));
            let end = chain(LINKS);
            report.check(end == END_OF_CHAIN, || format!("CPU {cpu}: the chain ends in {end:02x?}"));
            report.pass();
            thread::sleep(start.elapsed().mul_f64(args.rest).min(REST_MAX));
        }
        Ok(())
    })
}

fn primes_below(end: usize) -> usize {
    let mut composite = vec![false; end];
    let mut count = 0;
    for number in 2..end {
        if composite[number] {
            continue;
        }
        count += 1;
        for multiple in (number * number..end).step_by(number) {
            composite[multiple] = true;
        }
    }
    count
}

fn chain(links: usize) -> [u8; 32] {
    (0..links).fold([0; 32], |link, _| Sha256::digest(link).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_known_results_are_right() {
        assert_eq!(primes_below(PRIMES_BELOW), PRIMES);
        assert_eq!(chain(LINKS), END_OF_CHAIN);
    }
}
