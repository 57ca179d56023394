//! Programs that do what few do, held against what becomes of them on the host: faults of all kinds, flags, single steps, returns
//! that the processor refuses, addresses that the machine needs, and instructions at random.

use super::*;

/// Bytes of the address space that the monitor and the kernel have: the program is told what it cannot have.
const REFUSED: &[&str] = &[
    "hosted: page 1: EPERM",
    "hosted: the monitor's code: ENOMEM",
    "hosted: the kernel's code: ENOMEM",
    // As on a kernel without calls of 32 bits: a fault, with the number of the gate.
    "hosted: call of 32 bits: status 0 signal 11 code 128 trap 13 error 0x402 address 0",
];

/// Seed and number of the instructions that every run of the tests tries.
const SHORT: &str = "stress 1 5000";

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

/// What the program says, of which the host's kernel and a guest's must say the same.
fn facts(said: &str) -> Vec<&str> {
    said.lines().filter(|line| line.starts_with("odd: ")).collect()
}

/// What the program says on the host.
fn natively(program: &Path, arguments: &str) -> String {
    let mut command = Command::new("setarch");
    command.arg("-R").arg(program).args(arguments.split(' ').filter(|word| !word.is_empty()));
    let output = command.output().expect("the program");
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).expect("text")
}

/// What a shell of the guest's is to do with the program before anything else.
pub(super) fn lines() -> String {
    format!("/bin/odd hosted\n/bin/odd {SHORT}\n")
}

/// Holds what the guest has said against what the host says.
pub(super) fn compare(program: &Path, log: &str) {
    let native = natively(program, "") + &natively(program, SHORT);
    let (native, hosted) = (facts(&native), facts(log));
    let wrong = native.iter().zip(&hosted).find(|(one, other)| one != other);
    assert!(wrong.is_none() && native.len() == hosted.len(), "{wrong:#?}\n{log}");
    for line in REFUSED {
        assert!(log.contains(line), "{line}: {log}");
    }
}

/// How long instructions are tried with each kind of isolation; more with `MERCURY_ODD_SECONDS`.
const SECONDS: u64 = 60;
/// A round of it.
const ROUND: u64 = 200_000;

/// One after the other, with one processor and with two.
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
    for seed in 2.. {
        if start.elapsed() > limit {
            println!("{} instructions at random, with both kinds of isolation", (seed - 2) * ROUND);
            break;
        }
        let arguments = format!("stress {seed} {ROUND}");
        let cpus = if seed % 2 == 0 { "1" } else { "2" };
        let native = natively(&program, &arguments);
        for isolation in ISOLATIONS {
            let mut command = place.run();
            command.arg("--initramfs").arg(&archive).args([isolation, "--cpus", cpus]);
            command.args(["--append", &format!("-- {arguments}")]);
            let log = Machine::start(&place, &mut command).end(RESET);
            assert_eq!(facts(&log), facts(&native), "{arguments}, {isolation}, {cpus}");
            assert_well(&log);
        }
    }
    Ok(())
}
