//! `mercury log`: the rings of all CPUs, merged in the order of time.

use crate::{
    msr,
    output::{Hex, Render, Text, Tone, thousands},
    svm,
    sysroot::Sysroot,
};
use mercury_abi::{
    code::Code,
    refusal::Refusal,
    shared::{LOG_RECORDS, LogKind, LogRecord, SHARED_MAGIC, SharedCpu},
    snapshot::RollbackReason,
};
use serde::Serialize;
use std::{collections::BTreeMap, ops::Range};

/// A pair of times that relates the TSC to the seconds since boot, which `dmesg` prints.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Clock {
    /// Value of the TSC.
    pub tsc: u64,
    /// Seconds since boot at that moment.
    pub seconds: f64,
    /// TSC frequency in kHz.
    pub tsc_khz: u64,
}

impl Clock {
    fn seconds_at(&self, tsc: u64) -> f64 {
        let ticks_ago = self.tsc as f64 - tsc as f64;
        if self.tsc_khz == 0 { 0.0 } else { self.seconds - ticks_ago / (self.tsc_khz as f64 * 1000.0) }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Event {
    /// Seconds since boot, as `dmesg` prints them.
    pub seconds: f64,
    /// TSC at the time of writing.
    pub tsc: u64,
    /// Number of the CPU in Linux.
    pub cpu: u32,
    /// Number of the record on this CPU, counting from 1.
    pub sequence: u64,
    pub kind: &'static str,
    /// True if Mercury's own driver caused it.
    pub own: bool,
    /// Description of the event.
    pub text: String,
    /// Arguments as they were written.
    pub arguments: [Hex; 5],
    #[serde(skip)]
    tone: Option<Tone>,
}

/// The result of reading the rings once.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Events {
    /// New events in the order of time.
    pub events: Vec<Event>,
    /// Records that were overwritten before they were read.
    pub lost: u64,
}

/// A reader that reads the rings again and again, and returns each event once.
#[derive(Clone, Debug, Default)]
pub struct Reader {
    /// Last record seen, per CPU.
    seen: BTreeMap<u32, u64>,
    /// Addresses of the driver's code.
    driver: Range<u64>,
}

impl Reader {
    /// Makes a reader that knows the driver, and so which events the driver has caused. Only root
    /// is told the driver's address.
    #[must_use]
    pub fn new(sysroot: &Sysroot) -> Self {
        let driver = addresses(&sysroot.text("proc/modules").unwrap_or_default(), "mercury");
        Self { driver: driver.unwrap_or_default(), ..Self::default() }
    }

    /// Returns the events that are new since the last call.
    pub fn read(&mut self, shared: &[SharedCpu], clock: &Clock) -> Events {
        let mut all = Events::default();
        for block in shared.iter().filter(|block| block.magic == SHARED_MAGIC) {
            self.read_block(block, clock, &mut all);
        }
        all.events.sort_by_key(|event| (event.tsc, event.cpu, event.sequence));
        all
    }

    fn read_block(&mut self, block: &SharedCpu, clock: &Clock, all: &mut Events) {
        let seen = self.seen.get(&block.cpu).copied().unwrap_or(0);
        // Fewer records than seen: the hypervisor was unloaded and loaded again.
        let seen = if block.log_written < seen { 0 } else { seen };
        let oldest = block.log_written.saturating_sub(LOG_RECORDS as u64) + 1;
        if seen != 0 {
            all.lost += oldest.saturating_sub(seen + 1);
        }
        let new = |record: &&LogRecord| record.sequence > seen && record.sequence <= block.log_written;
        let event = |record| event(record, clock, &self.driver);
        all.events.extend(block.log.iter().filter(new).map(event));
        self.seen.insert(block.cpu, block.log_written);
    }
}

/// Returns the addresses of a module's code, from /proc/modules. Newer kernels give the size of all
/// its parts, which may be larger than the distance to the next module.
fn addresses(modules: &str, name: &str) -> Option<Range<u64>> {
    let address = |line: &str| {
        let text = line.split(' ').find_map(|word| word.strip_prefix("0x"))?;
        u64::from_str_radix(text, 16).ok().filter(|address| *address != 0)
    };
    let line = modules.lines().find(|line| line.split(' ').next() == Some(name))?;
    let (start, size) = (address(line)?, line.split(' ').nth(1)?.parse::<u64>().ok()?);
    let next = modules.lines().filter_map(address).filter(|other| *other > start).min();
    Some(start..next.unwrap_or(u64::MAX).min(start.saturating_add(size)))
}

fn event(record: &LogRecord, clock: &Clock, driver: &Range<u64>) -> Event {
    let own = record.kind == LogKind::Msr as u32 && driver.contains(&record.arguments[4]);
    let (kind, text, tone) = decode(record, own);
    Event {
        seconds: clock.seconds_at(record.tsc),
        tsc: record.tsc,
        cpu: record.cpu,
        sequence: record.sequence,
        kind,
        own,
        text,
        arguments: record.arguments.map(Hex),
        tone,
    }
}

/// Returns kind, sentence and colour of a record. The numbers are
/// [`mercury_abi::shared::LogKind`]'s.
fn decode(record: &LogRecord, own: bool) -> (&'static str, String, Option<Tone>) {
    let [a, b, c, d, _] = record.arguments;
    match record.kind {
        1 => ("attached", "attached".into(), Some(Tone::Good)),
        2 => ("detached", "detached".into(), Some(Tone::Good)),
        3 => ("left", left(a, b, c, d), Some(Tone::Doubtful)),
        4 => ("msr", msr(a, b, c, d, own), None),
        5 => ("nested-fill", format!("nested map extended at {a:#x} (rip {b:#x})"), None),
        6 => (
            "hidden-write",
            format!("write to hidden memory at {a:#x} dropped (rip {b:#x})"),
            Some(Tone::Doubtful),
        ),
        7 => ("reinjected", format!("event {a:#x} handed over again after {}", svm::exit_name(b)), None),
        8 => ("crash", crash(a, b, c, d), Some(Tone::Bad)),
        9 => {
            let check =
                Refusal::from_number(a).map_or_else(|| format!("check {a:#x}"), |why| why.text().into());
            ("invalid-state", format!("control block refused: {check}, value {b:#x}"), Some(Tone::Bad))
        }
        10 => ("event-lost", format!("event {a:#x} lost after {}", svm::exit_name(b)), Some(Tone::Bad)),
        11 => ("rolled-back", rolled_back(a, b, c), Some(Tone::Doubtful)),
        12 => (
            "foreign-store",
            format!("store to read-only code or constants at {a:#x} (rip {b:#x}, called from {c:#x})"),
            Some(Tone::Bad),
        ),
        kind => ("unknown", format!("record of unknown kind {kind}"), None),
    }
}

fn code_name(number: u64) -> String {
    let code = u32::try_from(number).ok().and_then(Code::from_number);
    code.map_or_else(|| format!("code {number}"), |code| code.name().to_string())
}

fn rolled_back(reason: u64, cpu: u64, pages: u64) -> String {
    let name = RollbackReason::NAMES.iter().find(|(known, _)| u64::from(*known as u32) == reason);
    let name = name.map_or("unknown", |(_, name)| name);
    format!("the machine was put back to its snapshot: {name} on CPU {cpu}; {pages} pages")
}

fn left(code: u64, exit: u64, rip: u64, detail: u64) -> String {
    format!(
        "left the hypervisor by itself: {} ({}, rip {rip:#x}, detail {detail:#x})",
        code_name(code),
        svm::exit_name(exit)
    )
}

fn msr(number: u64, value: u64, written: u64, faulted: u64, own: bool) -> String {
    let verb = if written != 0 { "written" } else { "read" };
    let asker = if own { "Mercury's own driver" } else { "the system" };
    let fault = if faulted != 0 { ", which faulted" } else { "" };
    format!("{} {verb} for {asker} ({value:#x}){fault}", msr::named(number))
}

fn crash(code: u64, cause: u64, host_rip: u64, guest_rip: u64) -> String {
    format!(
        "the hypervisor crashed: {} ({cause:#x}) at image+{host_rip:#x}, rip {guest_rip:#x}; \
         see `mercury status`",
        code_name(code)
    )
}

impl Render for Events {
    fn render(&self, to: &mut Text) {
        if self.lost > 0 {
            let text = format!("… {} records were overwritten before they were read", thousands(self.lost));
            to.line(to.tone(Tone::Doubtful, &text));
        }
        for event in &self.events {
            let text = event.tone.map_or(event.text.clone(), |tone| to.tone(tone, &event.text));
            to.line(format!("[{:12.6}] CPU {:<3} {text}", event.seconds, event.cpu));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::shared_cpu;

    const CLOCK: Clock = Clock { tsc: 10_000_000_000, seconds: 100.0, tsc_khz: 1_000_000 };

    /// Writes a record as the hypervisor does.
    fn write(block: &mut SharedCpu, tsc: u64, kind: u32, arguments: [u64; 5]) {
        let index = block.log_written as usize % LOG_RECORDS;
        block.log_written += 1;
        block.log[index] = LogRecord { sequence: block.log_written, tsc, kind, cpu: block.cpu, arguments };
    }

    fn rendered(events: &Events) -> String {
        let mut text = Text::new(false);
        events.render(&mut text);
        text.finish()
    }

    #[test]
    fn every_kind_is_told() {
        let mut block = shared_cpu(0);
        write(&mut block, 9_000_000_000, 1, [0; 5]);
        write(&mut block, 9_100_000_000, 4, [0xc000_2000, 0xff, 1, 0, 0]);
        write(&mut block, 9_110_000_000, 4, [0xc000_0080, 0xd01, 1, 0, 0xffff_ffff_8100_0000]);
        write(&mut block, 9_120_000_000, 4, [0xc001_0114, 0, 0, 1, 0xffff_ffff_c0a5_1234]);
        write(&mut block, 9_200_000_000, 5, [0x1000_0000_0000, 0xffff_ffff_8100_0000, 0, 0, 0]);
        write(&mut block, 9_300_000_000, 6, [0x1234_5000, 0xffff_ffff_8100_0000, 0, 0, 0]);
        write(&mut block, 9_400_000_000, 7, [0x8000_0020, 0x400, 0, 0, 0]);
        write(&mut block, 9_500_000_000, 3, [122, 0x7d, 0xffff_ffff_8100_0000, 0, 0]);
        write(&mut block, 9_600_000_000, 8, [120, 14, 0x1234, 0xffff_ffff_8100_0000, 0]);
        write(&mut block, 9_700_000_000, 9, [3, 0x40, 0, 0, 0]);
        write(&mut block, 9_800_000_000, 2, [0; 5]);
        write(&mut block, 9_850_000_000, 10, [0x8000_0020, 0x400, 0, 0, 0]);
        let callers = [0x123_4567, 0xffff_ffff_c0a5_1234, 0xffff_ffff_8110_0000, 0, 0];
        write(&mut block, 9_880_000_000, 12, callers);
        write(&mut block, 9_900_000_000, 77, [0; 5]);
        let driver = 0xffff_ffff_c0a5_1000..0xffff_ffff_c0a6_0000;
        let events = Reader { driver, ..Reader::default() }.read(&[block], &CLOCK);
        assert_eq!(events.events.iter().filter(|event| event.own).count(), 1);
        insta::assert_snapshot!(rendered(&events));
    }

    #[test]
    fn the_driver_has_an_address() {
        let modules = "other 1 0 - Live 0xffffffffc0a60000\nmercury 81920 0 - Live 0xffffffffc0a51000 (OE)\n";
        let found = addresses(modules, "mercury");
        assert_eq!(found, Some(0xffff_ffff_c0a5_1000..0xffff_ffff_c0a6_0000), "the next module begins there");
        let last = "mercury 4096 0 - Live 0xffffffffc0a51000\n";
        assert_eq!(addresses(last, "mercury"), Some(0xffff_ffff_c0a5_1000..0xffff_ffff_c0a5_2000));
        assert_eq!(addresses("mercury 4096 0 - Live 0x0000000000000000\n", "mercury"), None, "not root");
        assert_eq!(addresses(modules, "absent"), None);
    }

    #[test]
    fn cpus_are_merged_by_time() {
        let (mut one, mut two) = (shared_cpu(0), shared_cpu(1));
        write(&mut one, 300, 1, [0; 5]);
        write(&mut two, 100, 1, [0; 5]);
        write(&mut one, 400, 2, [0; 5]);
        write(&mut two, 350, 2, [0; 5]);
        let events = Reader::default().read(&[one, two], &CLOCK).events;
        assert_eq!(events.iter().map(|event| event.tsc).collect::<Vec<_>>(), [100, 300, 350, 400]);
    }

    #[test]
    fn each_event_comes_once() {
        let mut block = shared_cpu(0);
        let mut reader = Reader::default();
        write(&mut block, 1, 1, [0; 5]);
        assert_eq!(reader.read(&[block], &CLOCK).events.len(), 1);
        assert_eq!(reader.read(&[block], &CLOCK).events.len(), 0);
        write(&mut block, 2, 2, [0; 5]);
        assert_eq!(reader.read(&[block], &CLOCK).events.len(), 1);
    }

    #[test]
    fn overwritten_records_are_counted() {
        let mut block = shared_cpu(0);
        let mut reader = Reader::default();
        write(&mut block, 1, 1, [0; 5]);
        reader.read(&[block], &CLOCK);
        for tsc in 0..70 {
            write(&mut block, tsc, 1, [0; 5]);
        }
        let events = reader.read(&[block], &CLOCK);
        assert_eq!((events.events.len(), events.lost), (64, 6));
    }

    #[test]
    fn a_torn_record_is_left_out() {
        let mut block = shared_cpu(0);
        write(&mut block, 1, 1, [0; 5]);
        block.log[0].sequence = 0;
        assert!(Reader::default().read(&[block], &CLOCK).events.is_empty());
    }

    #[test]
    fn a_reload_starts_again() {
        let mut block = shared_cpu(0);
        let mut reader = Reader::default();
        (0..5).for_each(|tsc| write(&mut block, tsc, 1, [0; 5]));
        reader.read(&[block], &CLOCK);
        let mut fresh = shared_cpu(0);
        write(&mut fresh, 9, 1, [0; 5]);
        assert_eq!(reader.read(&[fresh], &CLOCK).events.len(), 1);
    }
}
