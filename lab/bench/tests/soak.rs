//! Shorter runs of the soaks, and ten thousand switches on one CPU.

#[path = "../../tests/workloads/mod.rs"]
mod workloads;

use mercury_lab::{Kernel, Machine, Platform, Result, Spec};
use mercury_lab_bench::soak::{self, Plan};

use workloads::{Workloads, load, switch};

#[test]
#[ignore = "long"]
fn three_hundred_cycles_beneath_everything() -> Result<()> {
    soak::run(Plan { batch: 60, ..Plan::new(Platform::chosen()?, 300) })?.check()
}

#[test]
#[ignore = "long"]
fn three_hundred_cycles_beneath_guests_that_crash() -> Result<()> {
    soak::guests::run(300)?.check()
}

/// Switches ten thousand times on one CPU, where no CPU waits for another.
#[test]
#[ignore = "long"]
fn ten_thousand_cycles_on_one_cpu() -> Result<()> {
    let machine = Machine::boot(Spec::new(Kernel::BookwormCloud).cpus(1).memory_mib(768))?;
    load(&machine)?;
    let workloads = Workloads::start(&machine, &["compute", "fpu", "flags"])?;
    switch(&machine, 10_000)?;
    workloads.finish()?;
    machine.check_next_attach()
}
