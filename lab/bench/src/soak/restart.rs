//! `lab soak --checkpoint`: machines are written to a disk, ended, and brought back in a fresh
//! emulator, again and again, with all their work.

use std::{
    fs,
    time::{Duration, Instant},
};

use mercury_lab::{
    driver::Variant,
    error::{Context, Error, Result},
    kernel::Kernel,
    live::{self, Line},
    machine::Machine,
    markdown::{table, thousands},
    paths,
    restart::{self, script},
    spec::{Bus, Platform, Qemu, Spec},
};

/// The machines: each kernel on so many CPUs.
const MACHINES: [(Kernel, u32); 6] = [
    (Kernel::BookwormCloud, 1),
    (Kernel::TrixieCloud, 1),
    (Kernel::BookwormCloud, 2),
    (Kernel::TrixieCloud, 2),
    (Kernel::BookwormCloud, 4),
    (Kernel::TrixieCloud, 4),
];
/// The work: its name, its script and the script's argument.
const WORK: [(&str, &str, &str); 6] = [
    ("clock", script::CLOCK, ""),
    ("echo", script::ECHO, ""),
    ("talk", script::TALK, "127.0.0.1"),
    ("chain", script::CHAIN, ""),
    ("ring", script::RING, ""),
    ("builds", script::BUILDS, ""),
];
/// The work that has a result at its end.
const WITH_RESULT: [&str; 3] = ["chain", "ring", "builds"];
/// The work that progresses all the time.
const COUNTING: [(&str, &str); 5] = [
    ("clock", "looks at the clock"),
    ("talk", "words over a TCP connection and back"),
    ("chain", "links of a chain of hashes"),
    ("ring", "tokens handed on by 200 processes, by pipes and shared memory"),
    ("builds", "builds with make and gcc"),
];
const DISK: &str = "/dev/vda";
/// The number of cycles from which docs/ gets a page.
const WORTH_A_PAGE: u64 = 12;

/// The record of one machine.
#[derive(Debug)]
struct Life {
    machine: String,
    kernel: String,
    cpus: u32,
    cycles: u64,
    /// Times from the command to the emulator's end, and from the next emulator's start to the
    /// machine's answer.
    times: Vec<[Duration; 2]>,
    /// The progress of each of `COUNTING` at the end.
    done: Vec<u64>,
    failure: Option<String>,
}

/// Runs `cycles` cycles, spread over all machines, prints the page, and writes it to docs/ if there
/// were enough.
///
/// # Errors
/// If a machine was not brought back, or something was wrong.
pub fn command(cycles: u64) -> Result<()> {
    if Platform::chosen()? != Platform::Qemu {
        return Err(Error::Unsupported {
            reason: "Bochs cannot have snapshots, or has no disk for the image",
        });
    }
    let begun = Instant::now();
    let machines = MACHINES.len() as u64;
    let lives: Vec<Life> = MACHINES
        .iter()
        .zip(0..)
        .map(|(&(kernel, cpus), index)| live(kernel, cpus, (cycles + index) / machines))
        .filter(|life| life.cycles > 0 || life.failure.is_some())
        .collect();
    let page = page(cycles, begun.elapsed(), &lives);
    println!("\n{page}");
    let failures: Vec<String> = lives.iter().filter_map(|life| life.failure.clone()).collect();
    if !failures.is_empty() {
        return Err(Error::Unhealthy(failures.join("\n\n")));
    }
    if cycles >= WORTH_A_PAGE {
        let path = paths::root().join("docs/soak-checkpoint.md");
        fs::write(&path, page).context(|| format!("write {}", path.display()))?;
        println!("written: {}", path.display());
    }
    Ok(())
}

/// Runs a machine's cycles until one fails.
fn live(kernel: Kernel, cpus: u32, cycles: u64) -> Life {
    let spec = Spec::new(kernel).cpus(cpus).disk(Bus::Virtio, 2048);
    let spec = spec.modules(Variant::Production).qemu_version(Qemu::Newer);
    let mut life = Life {
        machine: spec.summary(),
        kernel: String::new(),
        cpus,
        cycles: 0,
        times: Vec::new(),
        done: Vec::new(),
        failure: None,
    };
    if cycles > 0 {
        live::say(&format!("{cycles} checkpoints and restores: {}", life.machine));
        life.failure = life.run(spec, cycles).err().map(|error| {
            println!("after {} cycles: {error}", life.cycles);
            format!("{}, after {} cycles: {error}", life.machine, life.cycles)
        });
    }
    life
}

impl Life {
    fn run(&mut self, spec: Spec, cycles: u64) -> Result<()> {
        let mut machine = Machine::boot(spec)?;
        machine.kernel().clone_into(&mut self.kernel);
        machine.sh("ip link set lo up")?;
        WORK.iter()
            .try_for_each(|(name, script, argument)| restart::start(&machine, name, script, argument))?;
        let (boot, _folder) = restart::prepare(&machine, DISK, "--module $MERCURY_MODULE")?;
        let boot_id = restart::boot_id(&machine)?;
        let mut line = Line::begin();
        while self.cycles < cycles {
            let before = counts(&machine)?;
            let begun = Instant::now();
            restart::checkpoint(&machine, "", DISK)?;
            let away = begun.elapsed();
            machine = machine.start_other(&boot)?;
            self.times.push([away, begun.elapsed() - away]);
            restart::is_well(&machine, &boot_id)?;
            for ((name, _), before) in COUNTING.iter().zip(before) {
                restart::comes_further(&machine, name, before)?;
            }
            self.cycles += 1;
            line.show(&format!("{} of {cycles}", self.cycles));
        }
        self.done = counts(&machine)?;
        let results = restart::results(&machine, &WITH_RESULT)?;
        restart::check_chain(&results[0])?;
        machine.check_next_attach()?;
        machine.ends_clean()
    }
}

fn counts(machine: &Machine) -> Result<Vec<u64>> {
    COUNTING.iter().map(|(name, _)| restart::count(machine, name)).collect()
}

fn page(cycles: u64, elapsed: Duration, lives: &[Life]) -> String {
    let done: u64 = lives.iter().map(|life| life.cycles).sum();
    let minutes = elapsed.as_secs() / 60;
    format!(
        "# {done} times away and back\n\n\
        `cargo run -p mercury-lab-bench -- soak --checkpoint --cycles {cycles}` wrote this page. \
        Each machine was\n\
        emulated in software. At work it wrote itself to a disk (`mercury checkpoint --poweroff`), ended, \
        and was\n\
        restored from the disk in a fresh emulator, again and again. \
        All cycles took {minutes} minutes of wall time.\n\n\
        {}\n\
        The seconds are medians, on a host with other work: from the command to the machine's end, \
        and from the\n\
        next emulator's start to the machine's first answer.\n\n\
        After each return the machine was the same boot of the same kernel, and its wall clock was right. \
        Every kind\n\
        of work progressed and had seen no error. The kernel had written no call trace, \
        and ext4 no error.\n\n\
        At the end of each life the chain of hashes equalled this host's, \
        and the counts of the ring agreed with those\n\
        of its tokens. Each build was the same to the bit, and the hypervisor went in and out once more. \
        The root file\n\
        system of the machine, powered off, needed no repair (`e2fsck -fn`).\n\n\
        ## What was done meanwhile\n\n{}",
        machines(lives),
        work(lives),
    )
}

fn machines(lives: &[Life]) -> String {
    let row = |life: &Life| {
        let median = |which: usize| {
            let mut times: Vec<Duration> = life.times.iter().map(|times| times[which]).collect();
            times.sort_unstable();
            times.get(times.len() / 2).map_or_else(String::new, |time| format!("{:.0}", time.as_secs_f32()))
        };
        let went = if life.failure.is_some() { "**NO**" } else { "yes" };
        vec![
            life.kernel.clone(),
            life.cpus.to_string(),
            thousands(life.cycles),
            median(0),
            median(1),
            went.to_owned(),
        ]
    };
    let header = ["kernel", "CPUs", "times", "away, s", "back, s", "all was right"];
    table(&header, &lives.iter().map(row).collect::<Vec<_>>())
}

fn work(lives: &[Life]) -> String {
    let sum = |index: usize| lives.iter().filter_map(|life| life.done.get(index)).sum();
    let rows =
        COUNTING.iter().enumerate().map(|(index, (_, what))| vec![(*what).to_owned(), thousands(sum(index))]);
    table(&["work", "done"], &rows.collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_says_what_failed() {
        let life = |failure: Option<&str>| Life {
            machine: "m".into(),
            kernel: "6.1".into(),
            cpus: 2,
            cycles: 3,
            times: vec![[Duration::from_secs(4), Duration::from_secs(5)]; 3],
            done: vec![10; COUNTING.len()],
            failure: failure.map(str::to_owned),
        };
        let page = page(7, Duration::from_secs(120), &[life(None), life(Some("lost"))]);
        assert!(page.contains("# 6 times away and back") && page.contains("2 minutes"), "{page}");
        assert!(page.contains("**NO**") && page.contains("| looks at the clock"), "{page}");
    }
}
