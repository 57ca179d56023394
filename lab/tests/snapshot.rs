//! Snapshots of memory beneath machines at work: every page that is taken is what it was at the instant, by the
//! hypervisor's own hashes.

use mercury_lab::{Kernel, Machine, Platform, Result, Spec, Vendor, driver::Variant};

/// Direct and buffered, with the caches dropped in between: devices write to fresh pages, and to the same again.
const DISK_LOAD: &str = "while test ! -e /run/end; do cat /bin/* > /dev/null; echo 3 > /proc/sys/vm/drop_caches; \
     dd if=/dev/zero of=/root/x bs=1M count=20 oflag=direct 2> /dev/null; \
     dd if=/root/x of=/dev/null iflag=direct bs=1M 2> /dev/null; done";

fn are_exact(spec: Spec, rounds: u32) -> Result<()> {
    if Platform::chosen()? != Platform::Qemu {
        // Bochs's SVM forgets interrupts whose delivery makes a nested fault.
        Platform::need(Vendor::Intel, "this SVM reports no interrupts in delivery")?;
    }
    let machine = Machine::boot(spec.modules(Variant::Faults))?;
    let _work = machine.start_work()?;
    machine.mercury("attach")?;
    let mut load = machine.spawn(DISK_LOAD)?;
    println!("{}", machine.sh(&format!("mercury-workload snapshot --rounds {rounds}"))?);
    assert!(!load.has_ended()?, "{}", load.output_so_far()?);
    machine.sh("touch /run/end")?;
    machine.check_next_attach()
}

#[test]
fn exact_under_disk_load() -> Result<()> {
    are_exact(Spec::new(Kernel::BookwormCloud).cpus(2), 4)
}

/// Debian zeroes pages before devices get them, which hides what devices write: not here.
#[test]
fn exact_where_pages_are_not_zeroed() -> Result<()> {
    are_exact(Spec::new(Kernel::TrixieCloud).cpus(4).kernel_arg("init_on_alloc=0"), 3)
}
