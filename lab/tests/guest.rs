//! Bare machines that go on as guests of a host that is in use (`mercury restore --as-guest`).

#![allow(clippy::unwrap_used)]

use std::time::Instant;

use mercury_lab::{
    Bus, Kernel, Machine, Platform, Qemu, Result, Spec, Vendor,
    as_guest::{self, Guest, NAME},
    restart::{boot_id, comes_further, count, is_well, script::CLOCK, start},
};

fn need_kvm() -> Result<()> {
    Platform::need(Vendor::Amd, "the lab has no host with KVM on Intel")
}

/// Boots a machine like metal, lets it go on as a guest of another machine, and checks both.
fn goes_on(kernel: Kernel, cpus: u32) -> Result<()> {
    need_kvm()?;
    let source = Machine::boot(as_guest::source(kernel, cpus))?;
    start(&source, "clock", CLOCK, "")?;
    let (boot_id, before) = (boot_id(&source)?, count(&source, "clock")?);
    as_guest::checkpoint(&source)?;

    let host = source.boot_in_its_place(as_guest::host(Kernel::BookwormCloud, &source))?;
    let work = host.start_work()?;
    let started = Instant::now();
    let guest = Guest::start(&host, "--console socket")?;
    println!("the guest answers after {:.1} s", started.elapsed().as_secs_f32());
    is_well(&guest, &boot_id)?;
    assert!(count(&guest, "clock")? > before);
    assert_eq!(guest.sh("nproc")?, cpus.to_string());
    // Nothing of what is gone is left, and no application waited for it.
    let left = guest.sh("ls /sys/bus/pci/devices /sys/class/net /sys/block")?;
    println!("{left}\n{}", guest.sh("dmesg | tail -40")?);
    guest.check_log()?;
    is_seen_and_stopped(&host, guest)?;
    work.finish()?;
    host.check_health()
}

/// Checks that the commands about guests show the guest, and end it.
fn is_seen_and_stopped(host: &Machine, guest: Guest<'_>) -> Result<()> {
    let listed = host.mercury("guests list")?;
    let one = &listed["guests"][0];
    assert_eq!((one["name"].as_str(), one["phase"].as_str()), (Some(NAME), Some("running")), "{listed}");
    comes_further(&guest, "clock", count(&guest, "clock")?)?;
    let said = guest.stop()?;
    assert!(said.contains(&format!("stopped {NAME}")), "{said}");
    assert_eq!(host.mercury("guests list")?["guests"].as_array().unwrap().len(), 0);
    let again = host.mercury_refused(&format!("guests stop {NAME}"))?;
    assert_eq!(again.exit, 5, "{again:?}");
    Ok(())
}

#[test]
#[ignore = "long"]
fn a_bare_machine_goes_on_as_a_guest() -> Result<()> {
    goes_on(Kernel::BookwormGeneric, 1)
}

#[test]
#[ignore = "long"]
fn a_bare_machine_with_two_cpus_goes_on_as_a_guest() -> Result<()> {
    goes_on(Kernel::BookwormGeneric, 2)
}

#[test]
#[ignore = "long"]
fn a_bare_machine_with_6_12_goes_on_as_a_guest() -> Result<()> {
    goes_on(Kernel::TrixieGeneric, 1)
}

#[test]
#[ignore = "long"]
fn a_bare_machine_with_6_12_and_two_cpus_goes_on_as_a_guest() -> Result<()> {
    goes_on(Kernel::TrixieGeneric, 2)
}

/// Refuses a virtual machine with its disks mounted by all its reasons, and a host without KVM.
#[test]
#[ignore = "long"]
fn each_reason_against_a_guest_is_named() -> Result<()> {
    need_kvm()?;
    let spec = Spec::new(Kernel::BookwormCloud).disk(Bus::Virtio, 2048).qemu_version(Qemu::Newer);
    let machine = Machine::boot(spec)?;
    machine.mercury("checkpoint /dev/vda")?;
    let refused = machine.mercury_refused("restore --as-guest /dev/vda")?;
    assert_eq!(refused.exit, 3, "{refused:?}");
    assert!(refused.text.contains("/dev/kvm"), "{refused:?}");
    machine.sh("modprobe kvm_amd")?;
    let refused = machine.mercury_refused("restore --as-guest /dev/vda")?;
    assert_eq!(refused.exit, 3, "{refused:?}");
    for reason in ["virtio devices on PCI", "mounted"] {
        assert!(refused.text.contains(reason), "{reason}: {refused:?}");
    }
    // A file that is no image is refused as one.
    let refused = machine.mercury_refused("restore --as-guest /etc/passwd")?;
    assert!(refused.text.contains("image"), "{refused:?}");
    assert_eq!(machine.mercury("guests list")?["guests"].as_array().unwrap().len(), 0);
    machine.check_health()
}
