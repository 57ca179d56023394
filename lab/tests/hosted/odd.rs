//! Programs that do rare things, compared with the same programs on the host: faults of all kinds,
//! flags, single steps, returns that the processor refuses, addresses that the machine needs, and
//! random instructions.

use super::*;

/// Lines about parts of the address space that belong to the monitor and the kernel: the program is
/// refused them.
const REFUSED: &[&str] = &[
    "hosted: page 1: EPERM",
    // The kernel is built without it.
    "hosted: local descriptor table: ENOSYS",
    "hosted: the monitor's code: ENOMEM",
    "hosted: the kernel's code: ENOMEM",
    // As on a kernel without calls of 32 bits: a fault, with the number of the gate.
    "hosted: call of 32 bits: status 0 signal 11 code 128 trap 13 error 0x402 address 0",
];

/// Builds the program.
pub(super) fn program(place: &Place) -> PathBuf {
    let source = mercury_lab::paths::root().join("lab/guest/hosted/odd.c");
    let program = place.directory.join("odd");
    let mut compiler = Command::new("cc");
    compiler.args([
        "-O1",
        "-static",
        "-no-pie",
        "-fno-stack-protector",
        "-fcf-protection=none",
        "-mfsgsbase",
    ]);
    compiler.args(["-Wall", "-o"]).arg(&program).arg(source);
    let output = compiler.output().expect("a compiler");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    program
}

/// Returns the part of the program's output that must be the same on the host's kernel and a
/// guest's.
fn facts(said: &str) -> Vec<&str> {
    said.lines().filter(|line| line.starts_with("odd: ")).collect()
}

/// Returns the program's output on the host.
fn natively(program: &Path, arguments: &str) -> String {
    let mut command = Command::new("setarch");
    command.arg("-R").arg(program).args(arguments.split(' ').filter(|word| !word.is_empty()));
    let output = command.output().expect("the program");
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).expect("text")
}

/// The commands of a guest's shell. The program runs twice, since a kernel message may interrupt a
/// line.
pub(super) const LINES: &str = "/bin/odd hosted\n/bin/odd hosted\n";

/// Compares the guest's output with the host's.
pub(super) fn compare(program: &Path, log: &str) {
    let native = natively(program, "");
    for line in facts(&native) {
        assert!(log.lines().any(|one| one == line), "{line}: {log}");
    }
    for line in REFUSED {
        assert!(log.contains(line), "{line}: {log}");
    }
}

/// Time for random instructions, in seconds; `MERCURY_ODD_SECONDS` changes it.
const SECONDS: u64 = 60;
/// Instructions in a round.
const ROUND: u64 = 5_000;
/// Seeds with a case that reads the memory that a program's process shares with the monitor, and with cases
/// that read the heap.
const KNOWN_SEEDS: [u64; 2] = [32, 34];

/// Returns the arguments of a round. Cases that natively fault at the monitor's addresses are left
/// out: a program in a process of its own may read and write there.
fn round(program: &Path, seed: u64) -> String {
    let all = format!("stress {seed} {ROUND}");
    let native = natively(program, &all);
    let apart = native.lines().filter_map(|line| line.strip_prefix("apart: "));
    apart.fold(all.clone(), |arguments, case| arguments + " " + case)
}

/// Executes random instructions as the host does. Programs are in processes of their own: without
/// isolation a program may write to its kernel, and random ones do.
#[test]
#[ignore = "long"]
fn instructions_at_random_do_what_they_do_on_the_host() -> Result<()> {
    let seconds = std::env::var("MERCURY_ODD_SECONDS").ok().and_then(|text| text.parse().ok());
    let limit = Duration::from_secs(seconds.unwrap_or(SECONDS));
    let place = Place::new("odd")?;
    let program = program(&place);
    let mut archive = Archive::default();
    archive.directory("dev");
    archive.char_device("dev/console", (5, 1));
    archive.file("init", &fs::read(&program).expect("the program"));
    let archive = place.file("initramfs", &archive.finish());
    let start = Instant::now();
    let mut tried = 0;
    for seed in KNOWN_SEEDS.into_iter().chain(1..) {
        if start.elapsed() > limit {
            break;
        }
        let arguments = round(&program, seed);
        let mut command = place.run();
        let cpus = if seed % 2 == 0 { "2" } else { "1" };
        command.arg("--initramfs").arg(&archive).args([ISOLATIONS[1], "--cpus", cpus]);
        // The heap is where it is on the host, whose addresses are not random either.
        command.args(["--append", &format!("loglevel=1 norandmaps -- {arguments}")]);
        let log = Machine::start(&place, &mut command).end(RESET);
        assert_eq!(facts(&log), facts(&natively(&program, &arguments)), "{arguments}, {cpus} processors");
        tried += ROUND;
    }
    println!("{tried} instructions at random");
    Ok(())
}
