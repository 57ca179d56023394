//! `mercury-fuzz [--seconds N] [--seed S] [TARGET…]`: fuzzes the targets, all of them by default.
//! `mercury-fuzz --replay FILE TARGET`: runs one input.
//! `mercury-fuzz --seeds FOLDER [TARGET…]`: writes the first inputs, for `cargo fuzz`.
//!
//! A failing input is kept in `target/fuzz/`, and the command to run it again is printed.

use mercury_fuzz::{
    TARGETS, Target,
    run::{End, Report, Watched, run},
    target,
};
use std::{
    env, fs,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

struct Arguments {
    seconds: u64,
    seed: u64,
    replay: Option<PathBuf>,
    seeds: Option<PathBuf>,
    targets: Vec<&'static Target>,
}

fn main() -> ExitCode {
    let arguments = match arguments() {
        Ok(arguments) => arguments,
        Err(why) => {
            let names = TARGETS.map(|target| target.name).join(", ");
            eprintln!(
                "mercury-fuzz: {why}\nusage: mercury-fuzz [--seconds N] [--seed S] [--replay FILE | --seeds \
                 FOLDER] [TARGET…]"
            );
            eprintln!("targets: {names}");
            return ExitCode::from(2);
        }
    };
    match (&arguments.replay, &arguments.seeds) {
        (Some(file), _) => replay(file, &arguments.targets),
        (None, Some(folder)) => write_seeds(folder, &arguments.targets),
        (None, None) => fuzz(&arguments),
    }
}

fn arguments() -> Result<Arguments, String> {
    let clock = SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |time| time.as_secs());
    let mut found = Arguments { seconds: 60, seed: clock, replay: None, seeds: None, targets: Vec::new() };
    let mut words = env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word} needs a value"));
        let number = |text: String| text.parse().map_err(|_| format!("{text} is not a number"));
        match word.as_str() {
            "--seconds" => found.seconds = number(value()?)?,
            "--seed" => found.seed = number(value()?)?,
            "--replay" => found.replay = Some(value()?.into()),
            "--seeds" => found.seeds = Some(value()?.into()),
            name => found.targets.push(target(name).ok_or(format!("there is no target {name}"))?),
        }
    }
    if found.targets.is_empty() {
        found.targets = TARGETS.iter().collect();
    }
    Ok(found)
}

fn replay(file: &Path, targets: &[&'static Target]) -> ExitCode {
    match fs::read(file) {
        Ok(input) => {
            targets
                .iter()
                .for_each(|target| println!("{}: outcome {:#x}", target.name, (target.run)(&input)));
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("mercury-fuzz: {}: {error}", file.display());
            ExitCode::FAILURE
        }
    }
}

fn write_seeds(folder: &Path, targets: &[&'static Target]) -> ExitCode {
    for target in targets {
        let folder = folder.join(target.name);
        let write = |(number, seed): (usize, Vec<u8>)| fs::write(folder.join(format!("seed-{number}")), seed);
        let written = fs::create_dir_all(&folder)
            .and_then(|()| (target.seeds)().into_iter().enumerate().try_for_each(write));
        if let Err(error) = written {
            eprintln!("mercury-fuzz: {}: {error}", folder.display());
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

/// Fuzzes the targets, as many at a time as there are processors.
fn fuzz(arguments: &Arguments) -> ExitCode {
    let workers = thread::available_parallelism().map_or(1, usize::from).min(arguments.targets.len());
    let queue = Mutex::new(arguments.targets.clone());
    let watched: Vec<Watched> = (0..workers).map(|_| Watched::default()).collect();
    let (has_failed, is_over) = (AtomicBool::new(false), AtomicBool::new(false));
    println!(
        "seed {}, {} s a target, without coverage (cargo fuzz has it)",
        arguments.seed, arguments.seconds
    );
    thread::scope(|scope| {
        let work = |watched: &Watched| {
            while let Some(target) = queue.lock().unwrap_or_else(PoisonError::into_inner).pop() {
                let end = End::After(Duration::from_secs(arguments.seconds));
                if !tell(target, &run(target, arguments.seed, end, watched)) {
                    has_failed.store(true, Ordering::Relaxed);
                }
            }
        };
        let threads: Vec<_> = watched.iter().map(|watched| scope.spawn(move || work(watched))).collect();
        scope.spawn(|| watch(&watched, &is_over));
        threads.into_iter().for_each(|thread| drop(thread.join()));
        is_over.store(true, Ordering::Relaxed);
    });
    if has_failed.into_inner() { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// Ends the process if an input hangs.
fn watch(watched: &[Watched], is_over: &AtomicBool) {
    while !is_over.load(Ordering::Relaxed) {
        thread::sleep(Duration::from_millis(200));
        if let Some((name, input)) = watched.iter().find_map(Watched::hang) {
            eprintln!("{name}: an input hangs: {}", keep(name, &input));
            std::process::exit(1);
        }
    }
}

/// Prints the report of a target. Returns true if no input failed.
fn tell(target: &Target, report: &Report) -> bool {
    println!("{:13} {:>9} inputs, {:>4} outcomes", target.name, report.inputs, report.outcomes);
    let Some(input) = &report.failed else { return true };
    eprintln!("{}: an input fails: {}", target.name, keep(target.name, input));
    false
}

/// Keeps an input, and returns the command that runs it again.
fn keep(name: &str, input: &[u8]) -> String {
    let folder = PathBuf::from("target/fuzz");
    let number = input.iter().fold(0xCBF2_9CE4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01B3)
    });
    let file = folder.join(format!("{name}-{number:016x}"));
    match fs::create_dir_all(&folder).and_then(|()| fs::write(&file, input)) {
        Ok(()) => format!("cargo run -p mercury-fuzz -- --replay {} {name}", file.display()),
        Err(error) => format!("it cannot be kept ({error}): {input:02x?}"),
    }
}
