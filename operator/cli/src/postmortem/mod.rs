//! `mercury postmortem`: the life that ended at the last rollback. Its memory is read while the next life
//! runs.

mod log;
mod memory;
pub mod stacks;

use self::{
    memory::Memory,
    stacks::{Cpu, Offsets, Symbols},
};
use crate::inspect::core::Core;
use clap::Args;
use mercury_abi::{
    ioctl::PostmortemRequest,
    restart::MERCURY_RANGE_KEPT,
    snapshot::{EndedCpu, hash},
};
use mercury_control::{
    access,
    device::{Access, Cursor, Device, Restart},
    driver::Driver,
    error::{Error, Result},
    exit::Exit,
    output::{Render, Text, Tone, bytes, duration, thousands, ticks_to_us},
    rollback::Rollback,
    say::Say,
    status::nul_padded,
    sysroot::Sysroot,
};
use mercury_image::{self as image, Chunk, Frame, Kind, Machine, Range, Source};
use mercury_quiesce::describe;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Frames that are read at a time.
const FRAMES: usize = 256;
/// Frames after which the core's file is settled. Its cache lies in memory that this life writes to, which
/// costs pages of the snapshot.
const SETTLE: u64 = 8192;
/// Lines of the log in text; JSON has all.
const LINES: usize = 60;

#[derive(Debug, Args)]
pub struct PostmortemArgs {
    /// Write the memory of the life that ended into this file as an ELF core, for crash, drgn and gdb
    #[arg(long, value_name = "FILE")]
    pub core: Option<PathBuf>,
    /// Give the memory of that life back, after the report
    #[arg(long)]
    pub drop: bool,
}

/// The life that ended.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    #[serde(flatten)]
    pub rollback: Rollback,
    /// Seconds of that life since the instant, or since the rollback before. They are lost.
    lived_s: f64,
    /// Bytes of memory in which it differed from the instant, and that are held for this report.
    held: u64,
    /// CPUs at its end.
    pub cpus: Vec<Cpu>,
    /// Lines of the kernel's log; none: the log's ring could not be found.
    pub log: Vec<String>,
    /// The core that was written.
    #[serde(skip_serializing_if = "Option::is_none")]
    core: Option<Written>,
    /// Reason why no core was written. The report stands, and the memory is kept for another try.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<Error>,
    /// True if its memory was given back.
    dropped: bool,
}

/// A core that was written.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Written {
    file: PathBuf,
    /// Bytes of memory in it.
    memory: u64,
    /// Test builds: true if its pages are those that the hypervisor found at the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    exact: Option<bool>,
}

impl Render for Report {
    fn render(&self, to: &mut Text) {
        to.line(format!("the life that ended: {}", self.rollback.text()));
        to.line(format!("lost: {} of work", duration(self.lived_s * 1e6)));
        for cpu in &self.cpus {
            let place = match (&cpu.function, cpu.in_user_mode) {
                (_, true) => "in its program".to_owned(),
                (Some(function), _) => format!("in {function}"),
                (None, _) => format!("at {:#x}", cpu.rip.0),
            };
            to.line(format!("CPU {}: {} (process {}), {place}", cpu.cpu, cpu.task, cpu.pid));
            cpu.calls.iter().for_each(|call| to.line(format!("    {call}")));
        }
        let skipped = self.log.len().saturating_sub(LINES);
        match self.log.is_empty() {
            true => to.line("the kernel's log was not found in its memory"),
            false => to.line(format!(
                "the end of its log ({} lines before are in --json):",
                thousands(skipped as u64)
            )),
        }
        self.log[skipped..].iter().for_each(|line| to.line(format!("    {line}")));
        if let Some(core) = &self.core {
            to.line(format!("{} of its memory are in {}", bytes(core.memory), core.file.display()));
        }
        if let Some(error) = &self.error {
            let failed = to.tone(Tone::Bad, "no core was written:");
            to.line(format!("{failed} {error}"));
            error.hint.iter().for_each(|hint| to.line(format!("  → {hint}")));
        }
        match self.dropped {
            true => to.line(format!("{} were given back", bytes(self.held))),
            false => to.line(format!(
                "{} are held for it; `mercury postmortem --drop` frees them",
                bytes(self.held)
            )),
        }
    }
}

/// Reports on the life that ended last.
///
/// # Errors
///
/// Returns an error if there is none. A core that cannot be written is a part of the report.
pub fn run(args: &PostmortemArgs, say: Say<'_>) -> Result<Exit> {
    access::need_root("postmortem")?;
    let device = Device::open(Access::Control)?;
    let Life { mut report, machine, ended, found } = Life::read(&device, &Sysroot::default())?;
    if let Some(path) = &args.core {
        match write(path, &device, &machine, &ended, &report.cpus, &found) {
            Ok(core) => report.core = Some(core),
            Err(error) => report.error = Some(error),
        }
    }
    report.dropped = args.drop && report.error.is_none();
    if report.dropped {
        device.postmortem_drop()?;
    }
    let exit = say.done(&report);
    Ok(report.error.map_or(exit, |error| error.exit))
}

/// Returns the report on the life that ended last.
///
/// # Errors
///
/// Returns an error if there is none.
pub fn report() -> Result<Report> {
    Life::read(&Device::open(Access::Control)?, &Sysroot::default()).map(|life| life.report)
}

/// A life that has ended.
struct Life {
    /// Its report, without a core.
    report: Report,
    machine: Machine,
    ended: Vec<EndedCpu>,
    found: PostmortemRequest,
}

impl Life {
    fn read(device: &Device, sysroot: &Sysroot) -> Result<Self> {
        let (found, ended) = device.postmortem()?;
        let machine = machine_of(&device.snapshot_machine()?, sysroot);
        let note = machine.vmcoreinfo.map_or((0, 0), |note| (note.phys, note.bytes));
        let memory = Memory::new(device, note, machine.cpus.first().map_or(0, |cpu| cpu.saved_phys));
        let symbols = Symbols::of(&sysroot.text("proc/kallsyms").unwrap_or_default());
        let offsets =
            Offsets { comm: found.comm_offset, pid: found.pid_offset, started: found.started_offset };
        let cpus: Vec<_> = ended.iter().map(|cpu| Cpu::of(&memory, &symbols, offsets, cpu)).collect();
        let tsc_khz = device.system()?.tsc_khz;
        let report = Report {
            rollback: Rollback::new(&found.status.rollback, message(&found), tsc_khz),
            lived_s: ticks_to_us(found.status.rollback.lived_ticks, tsc_khz) / 1e6,
            held: found.status.dead_pages * memory::PAGE as u64,
            log: log::read(&memory).unwrap_or_default(),
            dropped: false,
            core: None,
            error: None,
            cpus,
        };
        Ok(Self { report, machine, ended, found })
    }
}

fn message(found: &PostmortemRequest) -> String {
    let bytes: Vec<u8> = found.message.iter().flat_map(|word| word.to_le_bytes()).collect();
    nul_padded(&bytes).trim_end().to_owned()
}

/// Returns as much of a machine's description as a core needs.
fn machine_of(restart: &Restart, sysroot: &Sysroot) -> Machine {
    let kept = restart.ranges.iter().filter(|range| range.kind == MERCURY_RANGE_KEPT);
    let range = |start_phys, pages| Range { start_phys, pages, kind: Kind::Kept };
    let cpu = |cpu: &mercury_abi::restart::RestartCpu| image::Cpu {
        cpu: cpu.cpu,
        apic_id: cpu.apic_id,
        saved_phys: cpu.saved_phys,
    };
    Machine {
        cpus: restart.cpus.iter().map(cpu).collect(),
        ranges: kept.map(|kept| range(kept.start_phys, kept.pages)).collect(),
        vmcoreinfo: describe::crash_note(sysroot),
        ..Machine::default()
    }
}

/// Writes a core of all memory.
fn write(
    path: &Path,
    device: &Device,
    machine: &Machine,
    ended: &[EndedCpu],
    cpus: &[Cpu],
    found: &PostmortemRequest,
) -> Result<Written> {
    let mut core = Core::create(path, machine)?;
    let (mut pages, mut all) = (0, 0);
    for range in &machine.ranges {
        let end_phys = range.start_phys + range.pages * memory::PAGE as u64;
        let mut cursor = Cursor { next_phys: range.start_phys, end_phys };
        while !cursor.is_done() {
            let frames = device.snapshot_read(&mut cursor, FRAMES)?;
            pages += frames.phys.len() as u64;
            all = frames.data.chunks(memory::PAGE).fold(all, |all, page| hash(&[all, hash(&words(page))]));
            core.add(&chunk(&frames.phys, &frames.data))?;
            if pages % SETTLE < frames.phys.len() as u64 {
                core.settle()?;
            }
        }
    }
    if pages != machine.kept_pages() {
        let text =
            format!("{} of {} pages could not be read", machine.kept_pages() - pages, machine.kept_pages());
        return Err(Error::new(Exit::Failed, text).hint("`dmesg` may tell of broken memory"));
    }
    let threads: Vec<_> = ended.iter().copied().zip(cpus.iter().map(thread)).collect();
    core.finish(machine, &threads)?;
    let expected = found.status.rollback.dead_hash;
    let exact = (expected != 0).then_some(all == expected);
    Ok(Written { file: path.to_owned(), memory: pages * memory::PAGE as u64, exact })
}

/// Returns the number of a CPU's thread in the core. All idle CPUs have task 0, and gdb would take them for
/// one thread: they get numbers that no task has (beyond Linux's `PID_MAX_LIMIT`).
fn thread(cpu: &Cpu) -> u32 {
    if cpu.pid == 0 { (1 << 22) + 1 + cpu.cpu } else { cpu.pid }
}

fn words(page: &[u8]) -> Vec<u64> {
    page.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect()
}

/// Returns frames for a core, where zeros are holes.
fn chunk(phys: &[u64], data: &[u8]) -> Chunk {
    let mut chunk = Chunk { frames: Vec::with_capacity(phys.len()), data: Vec::with_capacity(data.len()) };
    for (phys, page) in phys.iter().zip(data.chunks(memory::PAGE)) {
        let is_zero = page.iter().all(|byte| *byte == 0);
        let source = if is_zero { Source::Zero } else { Source::Data };
        chunk.frames.push(Frame { phys: *phys, source });
        if !is_zero {
            chunk.data.extend_from_slice(page);
        }
    }
    chunk
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use mercury_abi::snapshot::RollbackReport;
    use mercury_control::output::{Format, Hex, text};

    pub fn report(rollback: Rollback, cpus: Vec<Cpu>, log: &[&str]) -> Report {
        let log = log.iter().map(|line| (*line).to_owned()).collect();
        Report { rollback, lived_s: 1.0, held: 4096, cpus, log, core: None, error: None, dropped: false }
    }

    pub fn cpu(cpu: u32, pid: u32, task: &str) -> Cpu {
        let task = task.to_owned();
        Cpu { cpu, in_user_mode: false, task, pid, started_ns: 0, rip: Hex(0), function: None, calls: vec![] }
    }

    #[test]
    fn a_report_stands_without_its_core() {
        let rollback = RollbackReport { count: 1, reason: 2, ..RollbackReport::default() };
        let report = Report {
            error: Some(Error::new(Exit::Failed, "the disk is full").hint("use another")),
            ..report(Rollback::new(&rollback, "it died".into(), 1), vec![], &["a line"])
        };
        let words = text(Format::Text, "postmortem", &report);
        for wanted in ["a line", "no core was written: the disk is full", "→ use another", "--drop"] {
            assert!(words.contains(wanted), "{wanted}: {words}");
        }
        // One document, with the failure where every command has it.
        let json = text(Format::Json, "postmortem", &report);
        let value: serde_json::Value = serde_json::from_str(&json).expect("one document");
        assert_eq!(
            (&value["error"]["message"], &value["log"][0]),
            (&"the disk is full".into(), &"a line".into())
        );
    }
}
