//! `lab bench footprint`: the memory of hosted machines, as this host's kernel counts it.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::Duration,
};

use mercury_lab::{
    artefacts,
    error::{Context, Result},
    footprint::{self, Footprint},
    hosted::root_archive,
    image::{Image, Release},
    markdown::table,
    paths,
    previrtualization::{self, Flavour},
};
use serde::Serialize;

use crate::running::Running;

/// The heading of this section in docs/benchmarks.md.
pub const HEADING: &str = "## Memory of hosted machines";
/// The key of this section in docs/benchmarks.json.
pub const KEY: &str = "footprint";

/// The largest monitor of an idle machine, in MiB.
const AT_MOST: f64 = 4.0;
const MEMORY_MIB: &str = "256";
const PROGRAMS: usize = 20;
/// The time after which a machine has nothing to do any more.
const REST: Duration = Duration::from_secs(3);

/// The options that are measured, with the words for them and their keys.
const OPTIONS: [(&str, &str, &[&str]); 3] = [
    ("no isolation", "none", &[]),
    ("`--isolation=process`", "process", &["--isolation=process"]),
    ("no isolation, `--cpus 2`", "cpus_2", &["--cpus", "2"]),
];

/// The figures of all options.
#[derive(Debug, Serialize)]
pub struct Figures {
    machines: Vec<Row>,
}

/// Memory in MiB.
#[derive(Debug, Serialize)]
struct Row {
    options: &'static str,
    idle: Memory,
    /// The same with programs that sleep, each in an address space of its own.
    with_20_programs: Memory,
}

#[derive(Debug, Serialize)]
struct Memory {
    processes: u64,
    monitor_mib: f64,
    /// The part of it that is the program's file.
    program_mib: f64,
    guest_mib: f64,
    page_tables_mib: f64,
}

impl From<Footprint> for Memory {
    fn from(all: Footprint) -> Self {
        let mib = |kib: u64| (kib as f64 / 1024.0 * 10.0).round() / 10.0;
        Self {
            processes: all.processes,
            monitor_mib: mib(all.monitor),
            program_mib: mib(all.program),
            guest_mib: mib(all.guest),
            page_tables_mib: mib(all.page_tables),
        }
    }
}

/// Measures a machine with each of the options.
///
/// # Errors
/// If a part of the project does not build or a machine does not come up.
pub fn measure(release: Release) -> Result<Figures> {
    let vmlinux = previrtualization::build(release, Flavour::PreVirtualized)?.vmlinux;
    let mercury = artefacts::build_hosted()?;
    let dir = paths::lab_dir("bench")?;
    let archive = archive(release, &dir)?;
    let machine = |(_, key, options): &(&str, &'static str, &[&str])| {
        let mut command = Command::new(&mercury);
        command.args(["hosted", "run", "--memory", MEMORY_MIB, "--kernel"]).arg(&vmlinux);
        command.arg("--initramfs").arg(&archive).args(["--append", "quiet loglevel=1"]).args(*options);
        let mut machine = Running::start(&mut command, &dir.join("footprint.log"))?;
        let idle = rest(&mut machine, "up")?;
        let with_20_programs = rest(&mut machine, "all started")?;
        Ok(Row { options: key, idle, with_20_programs })
    };
    Ok(Figures { machines: OPTIONS.iter().map(machine).collect::<Result<_>>()? })
}

/// Makes the file system of the machines.
fn archive(release: Release, dir: &Path) -> Result<PathBuf> {
    let tree = Image::ensure(release)?.tree();
    let init = format!(
        "#!/bin/sh\necho up\nread word\nn=0\nwhile [ $n -lt {PROGRAMS} ]; do sleep 9999 & n=$((n + 1)); \
        done\n\
         echo all started\nread word\n"
    );
    let archive = root_archive(&tree, &[("bin/sleep", &tree.join("usr/bin/sleep"))], &[], &init)?;
    let path = dir.join("footprint.cpio");
    fs::write(&path, archive).context(|| format!("write {}", path.display()))?;
    Ok(path)
}

/// Waits until the machine has said a line and rests, measures it, and lets it go on.
fn rest(machine: &mut Running, line: &str) -> Result<Memory> {
    machine.wait_for(&format!("{line}\n"))?;
    thread::sleep(REST);
    let memory = footprint::of(machine.process())?;
    machine.type_line("go")?;
    Ok(memory.into())
}

/// Returns the promises, and if they are kept.
#[must_use]
pub fn promises(figures: &Figures) -> Vec<(bool, &'static str)> {
    let is_small = |row: &Row| row.idle.monitor_mib <= AT_MOST;
    vec![(figures.machines.iter().all(is_small), "the monitor of an idle machine is larger than promised")]
}

/// Returns the section in docs/benchmarks.md.
#[must_use]
pub fn section(figures: &Figures) -> String {
    let is_kept = promises(figures).iter().all(|(kept, _)| *kept);
    let header = ["", "processes", "monitor", "of it the program", "page tables", "guest"];
    let rows: Vec<Vec<String>> = figures.machines.iter().flat_map(rows).collect();
    format!(
        "{HEADING}\n\n\
        `lab bench footprint` writes this section alone. A machine of {MEMORY_MIB} MiB with the small \
        kernel runs a shell that\n\
        waits for input, and then {PROGRAMS} programs more that sleep, each in an address space of its own. \
        Memory is in MiB, as\n\
        the host's kernel counts the processes' shares (PSS): each page counts once. The monitor's program \
        is in it,\n\
        which other machines on the host share. The host maps more or less of it, as it happens to cache \
        the file. The\n\
        host's page tables are not in it. The goal for the monitor of an idle machine is {AT_MOST} MiB at \
        most ({}).\n\n{}",
        if is_kept { "kept" } else { "**missed**" },
        table(&header, &rows)
    )
}

fn rows(row: &Row) -> [Vec<String>; 2] {
    let words = OPTIONS.iter().find(|(_, key, _)| *key == row.options).map_or("", |(words, _, _)| words);
    let cells = |what: String, memory: &Memory| {
        let mib = [memory.monitor_mib, memory.program_mib, memory.page_tables_mib, memory.guest_mib];
        let numbers = mib.iter().map(|number| format!("{number:.1}"));
        [what, memory.processes.to_string()].into_iter().chain(numbers).collect()
    };
    [
        cells(format!("{words}, idle"), &row.idle),
        cells(format!("{words}, with {PROGRAMS} programs"), &row.with_20_programs),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(monitor: u64) -> Figures {
        let memory = |monitor| {
            Footprint { processes: 32, monitor, program: 1024, guest: 20_480, page_tables: 512 }.into()
        };
        let row = Row { options: "process", idle: memory(monitor), with_20_programs: memory(2 * monitor) };
        Figures { machines: vec![row] }
    }

    #[test]
    fn a_large_monitor_breaks_the_promise() {
        assert!(promises(&figures(4096))[0].0 && !promises(&figures(4300))[0].0);
        let text = section(&figures(5120));
        assert!(text.contains("(**missed**)") && text.contains("`--isolation=process`, idle"), "{text}");
        assert!(text.contains("|        32 |     5.0 |               1.0 |         0.5 |  20.0 |"), "{text}");
    }
}
