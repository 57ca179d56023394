//! Kernels that the afterburner has built. Every sensitive instruction is accounted for. The
//! kernels run on a bare machine as the same kernels do without slots, and cost hardly more.

use std::time::Duration;

use mercury_lab::{
    Machine, Platform, Release, Result, Spec, Vendor,
    previrtualization::{self, Flavour},
};
use mercury_lab_bench::previrtualization::{self as bench, Effort, Previrtualization};

/// The effort for each benchmark. Chance decides when a tick of the clock falls.
const EFFORT: Effort = Effort { samples: 3, timed_pairs: 0 };
const EMULATOR: &str = "this is about a kernel on any bare machine";

/// Boots the kernel on two processors, puts it to work, and looks for complaints.
fn boots_and_works(release: Release) -> Result<()> {
    Platform::need(Vendor::Amd, EMULATOR)?;
    let built = previrtualization::build(release, Flavour::PreVirtualized)?;
    let account = previrtualization::account(&built)?;
    assert_eq!(account["uncovered"], 0);
    assert!(account["sensitive"].as_u64() > Some(2000), "{account}");
    // The kernel chooses its place anew here, as on a bare machine.
    let machine =
        Machine::boot(Spec::new(previrtualization::kernel_of(release)).cpus(2).own_kernel(&built.image))?;
    assert!(machine.kernel().ends_with("-mercury-small"), "{}", machine.kernel());
    assert_eq!(machine.sh("nproc")?, "2");
    for module in &built.modules {
        let bytes = std::fs::read(module).expect("a module");
        machine.put("/run/module.ko", &bytes, 0o644)?;
        machine.sh("insmod /run/module.ko")?;
    }
    // Offline and online again: this executes hlt, and uses the local APIC and every descriptor
    // table.
    machine.sh(
        "echo 0 >/sys/devices/system/cpu/cpu1/online && echo 1 >/sys/devices/system/cpu/cpu1/online || true",
    )?;
    machine.start_postgres()?;
    let pgbench =
        machine.command("pgbench -n -c 4 -T 10 bench").timeout(Duration::from_secs(120)).run()?.check()?;
    assert!(pgbench.stdout.contains("number of failed transactions: 0"), "{}", pgbench.stdout);
    let log = machine.sh("dmesg")?;
    for word in [
        "BUG:",
        "WARNING: CPU",
        "Oops",
        "general protection",
        "rcu: INFO",
        "apply_alternatives",
        "return thunk",
    ] {
        assert!(!log.contains(word), "{word}: {log}");
    }
    machine.shut_down()
}

fn costs_next_to_nothing(release: Release) -> Result<()> {
    Platform::need(Vendor::Amd, "this counts instructions with QEMU's icount")?;
    let compared = bench::compare(release, EFFORT)?;
    println!("{compared:?}");
    let figures = Previrtualization::of(vec![compared]);
    bench::verdict(&figures)
}

#[test]
#[ignore = "long"]
fn a_small_6_1_is_covered_and_works() -> Result<()> {
    boots_and_works(Release::Bookworm)
}

#[test]
#[ignore = "long"]
fn slots_cost_6_1_next_to_nothing() -> Result<()> {
    costs_next_to_nothing(Release::Bookworm)
}

#[test]
#[ignore = "long"]
fn a_small_6_12_is_covered_and_works() -> Result<()> {
    boots_and_works(Release::Trixie)
}

#[test]
#[ignore = "long"]
fn slots_cost_6_12_next_to_nothing() -> Result<()> {
    costs_next_to_nothing(Release::Trixie)
}
