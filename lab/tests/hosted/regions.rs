//! Regions: memory to which several machines write.

use super::{
    disco::{disco, done, in_folder, pid, refused, tell, wait_for},
    *,
};

/// The first program does what it is told, line by line.
const INIT: &str = "#!/bin/sh\n\
    mkdir -p /proc /sys /dev; mount -t proc p /proc; mount -t sysfs s /sys; mount -t devtmpfs d /dev\n\
    while [ ! -e /dev/pmem0 ]; do :; done\n\
    sort_() { region-sort pmem0 \"$@\"; }\n\
    echo ready; while read -r line; do eval \"$line\"; done\n";
const TOOLS: [&str; 2] = ["mkdir", "mount"];
const LIBRARIES: [&str; 4] = ["libblkid.so.1", "libmount.so.1", "libpcre2-8.so.0", "libselinux.so.1"];
/// Time goes on while a machine is saved, and its kernel takes that for a stall.
const QUIET: &str = "rcupdate.rcu_cpu_stall_suppress=1 nosoftlockup";
const REGION: [&str; 2] = ["--region", "pool,64M"];
/// The numbers that are sorted.
const COUNT: u64 = 4_000_000;
/// The machines that sort: copies of one, and one that was started by itself.
const COPIES: u64 = 3;

/// Compiles the program for the machines.
fn program(place: &Place) -> PathBuf {
    let source = mercury_lab::paths::root().join("lab/guest/hosted/region-sort.c");
    let program = place.directory.join("region-sort");
    let mut compiler = Command::new("cc");
    compiler.args(["-O2", "-static", "-Wall", "-Wextra", "-Werror", "-o"]).arg(&program).arg(source);
    let output = compiler.output().expect("a compiler");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    program
}

/// Returns what the program says of so many numbers when they are sorted, computed by the host.
fn sorted(count: u64) -> String {
    let random = |index: u64| {
        let z = (index + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ z >> 31) as u32
    };
    let mut numbers: Vec<u32> = (0..count).map(random).collect();
    numbers.sort_unstable();
    let sum: u64 = numbers.iter().copied().map(u64::from).sum();
    let ordered = numbers.iter().fold(0xCBF2_9CE4_8422_2325_u64, |hash, number| {
        (hash ^ u64::from(*number)).wrapping_mul(0x0100_0000_01B3)
    });
    format!("checked {count} numbers, 0 out of order, sum {sum:x}, in order {ordered:x}, moved by")
}

/// Returns an initial RAM disk with the program.
fn archive(tree: &Path, program: &Path) -> Vec<u8> {
    let tools = TOOLS.map(|tool| (format!("bin/{tool}"), tree.join("usr/bin").join(tool)));
    let folder = "lib/x86_64-linux-gnu";
    let libraries =
        LIBRARIES.map(|name| (format!("{folder}/{name}"), tree.join("usr").join(folder).join(name)));
    let all = [&tools[..], &libraries, &[("bin/region-sort".to_owned(), program.to_owned())]].concat();
    let files: Vec<(&str, &Path)> = all.iter().map(|(name, path)| (name.as_str(), path.as_path())).collect();
    archive_with(tree, INIT, &files)
}

/// Returns the command for a machine that does what it is told.
fn run(place: &Place, archive: &Path, more: &[&str]) -> Command {
    let mut command = place.run();
    command.env("XDG_RUNTIME_DIR", place.directory.join("run")).current_dir(&place.directory);
    command.arg("--initramfs").arg(archive).args(["--memory", "128", "--append", QUIET]).args(more);
    command
}

fn run_refused(place: &Place, archive: &Path, more: &[&str], why: &str) {
    refused(&run(place, archive, more).stdin(Stdio::null()).output().expect("the command"), why);
}

/// Machines of both kinds sort numbers in one region. The end of one of them is nothing to the others. The
/// region ends with the last of them.
#[test]
#[ignore = "long"]
fn machines_sort_numbers_in_one_region() -> Result<()> {
    let place = Place::new("regions")?;
    in_folder(&place);
    let tree = Image::ensure(Release::Bookworm)?.tree();
    let archive = place.file("initramfs", &archive(&tree, &program(&place)));

    let mut machine = Machine::with_log(
        &mut run(&place, &archive, &[&REGION[..], &["--control", "control"]].concat()),
        &place.directory.join("first"),
    );
    machine.wait_for("ready\n");
    machine.type_line("sort_ fill 1000 1; sort_ sort 0; sort_ check");
    machine.wait_for(&format!("{} 4000\n", sorted(1000)));
    run_refused(&place, &archive, &["--region", "pool,32M"], "the region pool has 64 MiB, not 32");
    run_refused(&place, &archive, &["--region", "pool,63M"], "multiple of 2 MiB");
    run_refused(&place, &archive, &[&REGION[..], &["--cpus", "2"]].concat(), "one processor has regions");
    let mut save = as_nobody(&place.command);
    save.args(["hosted", "save", "control", "saved"]).current_dir(&place.directory);
    done(save);
    assert_well(&machine.end(HALTED));

    let template = [&["template", "web", "saved", "--kernel", "vmlinux", "--memory", "128"], &REGION[..]];
    done(disco(&place, &template.concat()));
    done(disco(&place, &["run", "web", "--count", &COPIES.to_string()]));
    let mut other = Machine::with_log(&mut run(&place, &archive, &REGION), &place.directory.join("other"));
    other.wait_for("ready\n");
    other.type_line("sort_ check");
    other.wait_for("the region has no numbers");
    let start = Instant::now();
    for number in 0..COPIES {
        tell(&place, &format!("web-{}", number + 1), &format!("sort_ sort {number}\n"));
    }
    other.type_line(&format!("sort_ fill {COUNT} {}; sort_ sort {COPIES}; sort_ check", COPIES + 1));
    let share = COUNT / (COPIES + 1) * 4;
    let expected = format!("{}{}\n", sorted(COUNT), format!(" {share}").repeat(COPIES as usize + 1));
    other.wait_for(&expected);
    println!("{} machines have sorted {COUNT} numbers in {} ms", COPIES + 1, start.elapsed().as_millis());
    for number in 0..COPIES {
        let machine = format!("web-{}", number + 1);
        wait_for(&place, &machine, &format!("sorted as {number} of {}\n", COPIES + 1));
        tell(&place, &machine, "sort_ check\n");
        assert_well(&wait_for(&place, &machine, &expected));
    }

    // A fork has the same region, and so has its source.
    done(disco(&place, &["fork", "web-1", "--name", "copy"]));
    tell(&place, "copy", "sort_ check\n");
    wait_for(&place, "copy", &expected);
    tell(&place, "copy", "sort_ fill 2000 2\n");
    wait_for(&place, "copy", "filled 2000\n");
    tell(&place, "copy", "sort_ sort 0\n");
    tell(&place, "web-1", "sort_ sort 1\n");
    wait_for(&place, "web-1", "sorted as 1 of 2\n");
    other.type_line("sort_ check");
    let few = format!("{} 4000 4000\n", sorted(2000));
    other.wait_for(&few);
    done(disco(&place, &["save", "web-1", "web-1.saved"]));
    refused(
        &disco(&place, &["sleep", "web-2"]).output().expect("the command"),
        "has disks in memory or a region",
    );

    // A machine that is killed, and the end of the template with its machines.
    kill_process(Pid::from_raw(pid(&place, "web-2")).expect("a number"), Signal::KILL).expect("its end");
    wait_for(&place, "web-2", "was ended by signal 9");
    tell(&place, "web-3", "sort_ check\n");
    wait_for(&place, "web-3", &few);
    done(disco(&place, &["rm", "web"]));
    other.type_line("sort_ fill 3000 1; sort_ sort 0; sort_ check");
    other.wait_for(&format!("{} 12000\n", sorted(3000)));
    assert_well(&other.said());
    drop(other);

    // Another region of the name, with another size.
    let end = Instant::now() + patient(LIMIT);
    while place.directory.join("run/mercury/regions/pool.socket").exists() {
        assert!(Instant::now() < end, "the region is kept");
        thread::sleep(Duration::from_millis(50));
    }
    let mut last = Machine::with_log(
        &mut run(&place, &archive, &["--region", "pool,32M"]),
        &place.directory.join("last"),
    );
    last.wait_for("ready\n");
    last.type_line("sort_ check");
    last.wait_for("the region has no numbers");
    Ok(())
}
