//! The native state after a detach. Everything that can be read of a CPU is as it was before, on
//! each CPU. While attached it differs in one bit, which shows the attachment.

#![allow(clippy::unwrap_used)]

mod workloads;

use mercury_lab::{Kernel, Machine, Result, Spec, Vendor};
use serde_json::Value;
use workloads::{kernel, load, load_test_module, report};

/// Returns the register and the bit by which software sees that the hardware is taken: EFER.SVME,
/// CR4.VMXE.
fn taken(vendor: Vendor) -> (&'static str, u64) {
    match vendor {
        Vendor::Amd => ("msr_c0000080", 1 << 12),
        Vendor::Intel => ("cr4", 1 << 13),
    }
}

fn states(machine: &Machine, cpus: u32) -> Result<Vec<Value>> {
    (0..cpus).map(|cpu| kernel(machine, &format!("state {cpu}"))).collect()
}

fn as_attached(vendor: Vendor, native: &Value) -> Value {
    let mut attached = native.clone();
    let (name, bit) = taken(vendor);
    let value = native[name].as_str().unwrap().trim_start_matches("0x");
    let value = u64::from_str_radix(value, 16).unwrap() | bit;
    attached[name] = format!("{value:#x}").into();
    attached
}

fn compare(when: &str, expected: &[Value], found: &[Value]) {
    for (cpu, (expected, found)) in expected.iter().zip(found).enumerate() {
        let names = expected.as_object().unwrap().keys();
        let different: Vec<String> = names
            .filter(|name| expected[*name] != found[*name])
            .map(|name| format!("{name} was {} and is {}", expected[name], found[name]))
            .collect();
        assert!(different.is_empty(), "CPU {cpu}, {when}: {}", different.join(", "));
        assert_eq!(expected.as_object().unwrap().len(), found.as_object().unwrap().len());
    }
}

/// Compares the states that the test module, which knows nothing of the driver, and the driver
/// read.
fn compare_on(spec: Spec, cpus: u32) -> Result<()> {
    let machine = Machine::boot(spec.cpus(cpus).memory_mib(768))?;
    load_test_module(&machine)?;
    let never_loaded = states(&machine, cpus)?;
    assert!(never_loaded[0].as_object().unwrap().len() > 60, "{}", never_loaded[0]);
    load(&machine)?;
    compare("loaded", &never_loaded, &states(&machine, cpus)?);
    let attached: Vec<_> = never_loaded.iter().map(|native| as_attached(machine.vendor(), native)).collect();
    for _ in 0..3 {
        machine.mercury("attach")?;
        compare("attached", &attached, &states(&machine, cpus)?);
        machine.mercury("detach")?;
        compare("detached", &never_loaded, &states(&machine, cpus)?);
    }
    let facts = report(&machine.run("mercury-workload state --cycles 20")?.check()?);
    assert_eq!((&facts["passes"], &facts["cpus"]), (&20.into(), &cpus.into()), "{facts}");
    for (command, mode) in [("detach", "native"), ("attach", "attached")] {
        machine.mercury(command)?;
        machine.mercury("verify")?;
        assert_eq!(machine.modes()?, vec![mode; cpus as usize].join(" "), "verify leaves the mode");
    }
    machine.mercury("detach")?;
    machine.mercury("unload")?;
    compare("unloaded", &never_loaded, &states(&machine, cpus)?);
    machine.check_next_attach()
}

/// A CPU that comes online after `verify` attaches, or stays native, as it would have before. After a kill
/// each CPU is in its mode. A machine without the driver has none afterwards.
#[test]
fn verify_leaves_the_machine_as_it_was() -> Result<()> {
    let machine = Machine::boot(Spec::new(Kernel::BookwormCloud).cpus(4).memory_mib(768))?;
    let online = |on: u8| machine.sh(&format!("echo {on} > /sys/devices/system/cpu/cpu3/online"));
    machine.mercury("verify")?;
    assert_eq!(machine.sh("grep -c '^mercury ' /proc/modules || true")?, "0");
    for (command, later) in [("attach", "attached"), ("attach --cpus 0-2", "native")] {
        online(0)?;
        machine.mercury(command)?;
        machine.mercury("verify")?;
        online(1)?;
        assert_eq!(machine.modes()?, format!("attached attached attached {later}"), "{command}");
        machine.mercury("detach")?;
    }
    let killed = "for i in $(seq 15); do mercury verify > /dev/null 2>&1 & sleep 0.$((i % 5))$i; \
        kill -KILL $! || true; wait $! || true; \
        while pgrep -f 'exe [u]ndo' > /dev/null; do sleep 0.05; done; done 2> /dev/null";
    machine.mercury("attach --cpus 0,2")?;
    machine.sh(killed)?;
    assert_eq!(machine.modes()?, "attached native attached native");
    machine.mercury("detach")?;
    machine.check_next_attach()
}

#[test]
fn debian_12() -> Result<()> {
    compare_on(Spec::new(Kernel::BookwormCloud), 4)
}

#[test]
#[ignore = "long"]
fn debian_13() -> Result<()> {
    compare_on(Spec::new(Kernel::TrixieCloud), 2)
}

#[test]
#[ignore = "long"]
fn five_level_paging() -> Result<()> {
    compare_on(Spec::new(Kernel::BookwormCloud).cpu_feature("+la57"), 2)
}

#[test]
#[ignore = "long"]
fn the_generic_kernel_with_machine_checks() -> Result<()> {
    compare_on(Spec::new(Kernel::BookwormGeneric), 2)
}
