//! Memory that the kernel holds for each additional checkpoint, compared with the same work without
//! a checkpoint. A leak is a slope that only the checkpoints have.

use std::{collections::BTreeMap, time::Duration};

use super::super::stats::median;
use mercury_lab::{
    error::{Error, Result},
    kernel::Kernel,
    machine::Machine,
    spec::{Qemu, Spec},
};

const LIMIT: Duration = Duration::from_secs(600);

/// The command that writes an image to nowhere.
const CHECKPOINT: &str =
    "mercury checkpoint --level 1 - > /dev/null 2> /run/said || { cat /run/said; exit 1; }";

/// The work that comes with a checkpoint: programs that start and take memory, groups that are
/// frozen, a file system that is written back and frozen.
const LIKE_IT: &str = "mercury status > /dev/null; sync; cd /sys/fs/cgroup; mkdir like.self like.rest; echo \
     1 > like.rest/cgroup.freeze; (echo $BASHPID > like.self/cgroup.procs; exec fsfreeze -f /) && fsfreeze \
     -u /; echo 0 > like.rest/cgroup.freeze; until rmdir like.self like.rest; do sleep 0.1; done; \
     head -c 32M /dev/urandom | python3 -c 'import sys; print(len(sys.stdin.buffer.read()))' > /dev/null";

/// The command that prints /proc/meminfo, in KiB, once nothing is cached. Free memory counts the
/// other way round.
const HELD: &str = "sync; for i in 1 2 3; do echo 3 > /proc/sys/vm/drop_caches; sleep 0.3; done; awk \
     '/^(MemFree|Slab|SUnreclaim|Percpu|VmallocUsed|KernelStack|PageTables):/ { print $1, $2 }' \
     /proc/meminfo";

/// KiB for each repetition, with the standard error of this number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Slope {
    pub each: f64,
    /// The standard error, in KiB.
    pub error: f64,
}

impl Slope {
    /// Returns the median of the slopes between any two samples (Theil and Sen). Its error is that
    /// of a line through as much noise.
    fn of(samples: &[f64]) -> Self {
        let count = samples.len();
        let pairs = (0..count).flat_map(|first| (first + 1..count).map(move |second| (first, second)));
        let each = median(
            &pairs
                .map(|(first, second)| (samples[second] - samples[first]) / (second - first) as f64)
                .collect::<Vec<_>>(),
        );
        let rest: Vec<f64> =
            samples.iter().zip(0..).map(|(sample, number)| sample - each * f64::from(number)).collect();
        let middle = median(&rest);
        let off: Vec<f64> = rest.iter().map(|rest| (rest - middle).abs()).collect();
        // In a normal distribution the median distance is this part of the standard deviation.
        let deviation = median(&off) / 0.6745;
        Self { each, error: deviation * (12.0 / (count as f64).powi(3)).sqrt() }
    }
}

/// A number of /proc/meminfo.
#[derive(Clone, Debug)]
pub struct Held {
    /// The number's name.
    pub name: String,
    /// The slope with checkpoints.
    pub checkpoints: Slope,
    /// The slope with the same work and no checkpoint.
    pub control: Slope,
}

impl Held {
    /// Returns the KiB that a checkpoint leaves beyond those of the same work without it.
    #[must_use]
    pub fn more(&self) -> f64 {
        self.checkpoints.each - self.control.each
    }

    /// Returns the noise of that number: three times its error.
    #[must_use]
    pub fn noise(&self) -> f64 {
        3.0 * self.checkpoints.error.hypot(self.control.error)
    }
}

/// Makes checkpoints, and as many times the same work, in turn. The first few are left out.
///
/// # Errors
/// If the machine fails.
pub fn measure(rounds: usize) -> Result<Vec<Held>> {
    let machine =
        Machine::boot(Spec::new(Kernel::BookwormCloud).cpus(2).memory_mib(512).qemu_version(Qemu::Newer))?;
    machine.sh("modprobe -r kvm_amd 2> /dev/null || true")?;
    machine.mercury("load")?;
    for _ in 0..3 {
        machine.command(CHECKPOINT).timeout(LIMIT).run()?.check()?;
        machine.command(LIKE_IT).timeout(LIMIT).run()?.check()?;
    }
    let control = series(&machine, LIKE_IT, rounds)?;
    let checkpoints = series(&machine, CHECKPOINT, rounds)?;
    machine.check_health()?;
    machine.shut_down()?;
    let of = |(name, samples): (String, Vec<f64>)| {
        let control = control.get(&name).map_or(&[][..], Vec::as_slice);
        Held { checkpoints: Slope::of(&samples), control: Slope::of(control), name }
    };
    Ok(checkpoints.into_iter().map(of).collect())
}

fn series(machine: &Machine, line: &str, rounds: usize) -> Result<BTreeMap<String, Vec<f64>>> {
    let mut all = BTreeMap::<_, Vec<f64>>::new();
    for _ in 0..rounds {
        machine.command(line).timeout(LIMIT).run()?.check()?;
        for word in machine.sh(HELD)?.lines() {
            let (name, kib) = word.split_once(": ").unwrap_or_default();
            let kib: f64 = kib.parse().map_err(|_| Error::Host(format!("/proc/meminfo: {word}")))?;
            all.entry(name.to_owned()).or_default().push(if name == "MemFree" { -kib } else { kib });
        }
    }
    println!("    {line:.20}: {all:?}");
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_leak_is_a_slope() {
        let noise = |number: u32| f64::from(number * 7 % 5) * 100.0;
        let flat: Vec<f64> = (0..30).map(noise).collect();
        let leaks: Vec<f64> = (0..30).map(|number| noise(number) + 40.0 * f64::from(number)).collect();
        let held = |samples: &[f64]| Held {
            name: String::new(),
            checkpoints: Slope::of(samples),
            control: Slope::of(&flat),
        };
        assert!(held(&flat).more().abs() < 1.0, "{:?}", held(&flat));
        let found = held(&leaks);
        assert!((found.more() - 40.0).abs() < 5.0 && found.more() > found.noise(), "{found:?}");
        assert!(found.noise() > 1.0);
    }
}
