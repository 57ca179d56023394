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

/// The size of a burst, in MiB.
const BURST: u64 = 192;
const BURST_INIT: &str = "#!/bin/sh\nmknod /zero c 1 5\necho up\nread word\n\
dd if=/zero of=/burst bs=1M count=192 2>/dev/null\necho full\nread word\n\
rm /burst\necho empty\nread word\n";

/// Memory that the guest has used and freed goes back to the host within seconds.
#[test]
#[ignore = "long"]
fn a_burst_is_given_back() -> Result<()> {
    let kernel = previrtualization::build(Release::Bookworm, Flavour::PreVirtualized)?;
    let place = Place::with("burst", &kernel)?;
    let tree = Image::ensure(Release::Bookworm)?.tree();
    let tools = ["dd", "mknod", "rm"].map(|tool| (format!("bin/{tool}"), tree.join("usr/bin").join(tool)));
    let folder = "lib/x86_64-linux-gnu";
    let libraries = ["libpcre2-8.so.0", "libselinux.so.1"]
        .map(|name| (format!("{folder}/{name}"), tree.join("usr").join(folder).join(name)));
    let files: Vec<(&str, &Path)> =
        tools.iter().chain(&libraries).map(|(name, path)| (name.as_str(), path.as_path())).collect();
    let archive = place.file("initramfs", &archive_with(&tree, BURST_INIT, &files));
    for isolation in ISOLATIONS {
        let mut command = place.run();
        command.arg("--initramfs").arg(&archive).args(["--memory", "512", isolation]);
        let mut machine = Machine::start(&place, &mut command);
        machine.wait_for("up\n");
        let before = measured(&machine, isolation);
        machine.type_line("go");
        machine.wait_for("full\n");
        let full = footprint::of(machine.child.id()).expect("the machine's memory");
        assert!(full.guest > before.guest + (BURST << 10) * 9 / 10, "{isolation}: {full:?}");
        machine.type_line("go");
        machine.wait_for("empty\n");
        let freed = Instant::now();
        let most = before.guest + (BURST << 10) / 20;
        let mut now = full;
        while now.guest > most {
            assert!(
                freed.elapsed() < patient(Duration::from_secs(5)),
                "{isolation}: {before:?}, then {now:?}"
            );
            thread::sleep(Duration::from_millis(50));
            now = footprint::of(machine.child.id()).expect("the machine's memory");
        }
        println!("{isolation}: 95 % of {BURST} MiB were given back after {:?}", freed.elapsed());
        machine.type_line("end");
        assert_well(&machine.end(RESET));
    }
    Ok(())
}
