//! Random input at both interfaces. It leads to errors only, never to a warning or a crash, and
//! everything works afterwards. `MERCURY_FUZZ_SEED` chooses another run.

#![allow(clippy::unwrap_used)]

mod workloads;

use std::time::Duration;

use mercury_lab::{Kernel, Machine, Result, Spec, is_full};
use workloads::{Repeated, Workloads, load, load_test_module, report, switch};

fn seed() -> u64 {
    std::env::var("MERCURY_FUZZ_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(1)
}

fn fuzz_ioctl(kernel: Kernel) -> Result<()> {
    let machine = Machine::boot(Spec::new(kernel).cpus(2).memory_mib(768))?;
    machine.mercury("load")?;
    let workloads = Workloads::start(&machine, &["compute", "fpu"])?;
    for seed in seed()..seed() + if is_full() { 3 } else { 1 } {
        let line = format!("mercury-workload fuzz-ioctl --seed {seed} --iterations 8000 --threads 4");
        let output = machine.command(&line).timeout(Duration::from_secs(120)).run()?.check()?;
        let report = report(&output);
        println!("seed {seed}: {report}");
        assert_eq!((&report["passes"], &report["violations"]), (&8000.into(), &0.into()), "{report}");
        for answer in ["ok", "EINVAL", "EFAULT", "ENOTTY", "EPERM"] {
            assert!(report["answers"][answer].as_u64().unwrap_or(0) > 10, "hardly any {answer}: {report}");
        }
        machine.check_next_attach()?;
    }
    workloads.finish()?;
    machine.mercury("unload")?;
    machine.check_next_attach()
}

#[test]
fn ioctls() -> Result<()> {
    fuzz_ioctl(Kernel::BookwormCloud)
}

#[test]
#[ignore = "long"]
fn ioctls_on_debian_13() -> Result<()> {
    fuzz_ioctl(Kernel::TrixieCloud)
}

#[test]
#[ignore = "long"]
fn hypercalls() -> Result<()> {
    let machine = Machine::boot(Spec::new(Kernel::BookwormCloud).cpus(2).memory_mib(768))?;
    load_test_module(&machine)?;
    load(&machine)?;
    // Attached all the time, from both CPUs at once; then while they switch; then native.
    machine.mercury("attach")?;
    let calls = |cpu: usize, seed: u64| format!("mercury-workload kernel --on {cpu} hypercall {seed} 20000");
    let both = |seed: u64| Ok([machine.spawn(&calls(0, seed))?, machine.spawn(&calls(1, seed + 1))?]);
    for call in both(seed())? {
        let report = report(&call.wait(Duration::from_secs(120))?.check()?);
        println!("attached: {report}");
        assert_eq!(report["illegal"], 0, "{report}");
        for answer in ["ok", "refused", "undefined"] {
            assert!(report[answer].as_u64().unwrap() > 1000, "{answer}: {report}");
        }
    }
    machine.mercury("detach")?;
    let workloads = Workloads::start(&machine, &["compute"])?;
    let changing =
        [0, 1].map(|cpu| Repeated::start(&machine, &format!("--on {cpu} hypercall 1$RANDOM 5000")));
    switch(&machine, 300)?;
    workloads.finish()?;
    for calls in changing {
        let sums = calls?.finish()?;
        assert_eq!(sums["illegal"], 0, "{sums:?}");
        assert!(sums["ok"] > 100 && sums["undefined"] > 100, "not on both sides: {sums:?}");
    }
    for call in both(seed() + 2)? {
        let report = report(&call.wait(Duration::from_secs(120))?.check()?);
        assert_eq!((&report["illegal"], &report["undefined"]), (&0.into(), &20000.into()), "{report}");
    }
    machine.check_next_attach()
}
