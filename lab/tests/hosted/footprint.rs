//! The memory that a machine takes beside its guest's.

use mercury_lab::footprint::{self, Footprint};

use super::*;

/// The largest monitor of a machine that is idle, in KiB: without the program's file, and with as much of the
/// file as the host may map.
const IDLE: u64 = 2 << 10;
const IDLE_WITH_PROGRAM: u64 = IDLE + (5 << 9);
/// The same with programs in 20 more address spaces.
const TWENTY: u64 = 10 << 10;

const INIT: &str = "#!/bin/sh\necho up\nread word\n\
for n in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do sleep 1000 & done\n\
echo all started\nread word\n";

/// Returns the memory of a machine that has nothing to do from now on.
fn measured(machine: &Machine, what: &str) -> Footprint {
    thread::sleep(Duration::from_secs(2));
    let memory = footprint::of(machine.child.id()).expect("the machine's memory");
    println!("{what}: {memory:?}");
    memory
}

/// Measures machines of the smallest kernel, in every run of the tests.
#[test]
fn an_idle_machine_has_a_small_monitor() -> Result<()> {
    let place = Place::with("footprint", &previrtualization::build(Release::Bookworm, Flavour::Tiny)?)?;
    let tree = Image::ensure(Release::Bookworm)?.tree();
    let sleep = tree.join("usr/bin/sleep");
    let archive = place.file("initramfs", &archive_with(&tree, INIT, &[("bin/sleep", &sleep)]));
    for isolation in ISOLATIONS {
        let mut command = place.run();
        command.arg("--initramfs").arg(&archive).args(["--memory", "128", isolation]);
        let mut machine = Machine::start(&place, &mut command);
        machine.wait_for("up\n");
        let idle = measured(&machine, isolation);
        assert!(
            (4..64).contains(&idle.processes) && idle.monitor <= IDLE_WITH_PROGRAM,
            "{isolation}: {idle:?}"
        );
        assert!(idle.monitor - idle.program <= IDLE, "{isolation}: {idle:?}");
        machine.type_line("go");
        machine.wait_for("all started\n");
        let busy = measured(&machine, &format!("{isolation} with 20 programs"));
        assert!(busy.guest > idle.guest && busy.monitor <= TWENTY, "{isolation}: {busy:?}");
        machine.type_line("end");
        assert_well(&machine.end(RESET));
    }
    Ok(())
}
