//! Stores to code and constants, seen while they are made. On an attached machine their pages are read-only
//! in the nested tables. The hypervisor logs a store of other code than the kernel's own, lets it through,
//! and lets the page be written from then on. A pass reads the log, mends, and makes the pages read-only
//! again.

#[cfg(test)]
mod simulated;

use super::{
    copy::Copied,
    frames::{PageTables, Poking, runs},
    layout::{self, Files, PAGE},
    memory::Memory,
    registers,
    report::{End, Finding, KIND_OF_STORES, now},
};
use mercury_abi::{
    gate::IntegrityCall,
    shared::{ExitReason, LogKind, READ_ONLY_LATER, SharedCpu},
};
use mercury_control::{access, device::Device, driver::Driver};
use std::{
    collections::BTreeMap,
    rc::Rc,
    time::{SystemTime, UNIX_EPOCH},
};

/// CR4.LA57: page tables of five levels.
const FIVE_LEVELS: u64 = 1 << 12;
/// Reason while the CPUs run on other tables.
const LATER: &str = "no store is seen while a snapshot is kept or a dirty log runs";

/// Pages by their physical address: address, and part.
pub type Frames = BTreeMap<u64, (u64, String)>;

/// The machine, as the watch of stores uses it.
pub trait Machine {
    /// Returns what the hypervisor publishes; nothing without the driver.
    fn published(&self) -> Vec<SharedCpu>;

    /// Has the hypervisor beneath a CPU execute a call.
    ///
    /// # Errors
    ///
    /// Returns the reason if it refuses.
    fn call(&mut self, cpu: u32, call: IntegrityCall, first: u64, second: u64) -> Result<(), String>;

    /// Returns the way in which the kernel changes its own code.
    ///
    /// # Errors
    ///
    /// Returns the reason if it is not known.
    fn poking(&mut self) -> Result<Poking, String>;

    /// Returns the pages of all parts that the kernel maps read-only.
    ///
    /// # Errors
    ///
    /// Returns the reason if a table cannot be read.
    fn frames(&mut self) -> Result<Frames, String>;

    /// Returns a number that no pages had before.
    fn number(&mut self) -> u64;
}

/// Read-only pages, and the log of stores to them.
#[derive(Clone, Debug, Default)]
pub struct Stores {
    pages: Pages,
    frames: Frames,
    /// Names of the parts whose pages these are.
    parts: Vec<String>,
    /// What was read of each CPU's log.
    seen: BTreeMap<u32, Seen>,
    /// Number of pages that were read-only beneath all attached CPUs after the last pass.
    guarded: u64,
}

/// Knowledge about the pages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
enum Pages {
    /// None: there was no attempt to make them read-only, or the last one failed.
    #[default]
    Unknown,
    /// They were made read-only beneath all CPUs that were attached.
    ReadOnly {
        /// Number that each CPU publishes as long as they are. A rollback, another program and a hypervisor
        /// that is loaded anew change what CPUs publish.
        number: u64,
        count: u64,
        /// True if a page can be written again, or may be: records of stores were lost.
        is_open: bool,
        /// Reason that not all pages are among them.
        missing: Option<String>,
    },
}

/// Step of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Nothing,
    /// Makes pages read-only that can be written.
    Protect,
    /// Begins anew on all CPUs.
    Begin,
}

/// Part of a CPU's log that was read.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    /// Number of the last record.
    records: u64,
    /// Number of stores that were read or are known to be lost.
    stores: u64,
}

/// Part of a CPU's log that was not read yet.
struct Unread {
    /// Arguments of the records of stores.
    stores: Vec<[u64; 5]>,
    /// Number of stores whose records were overwritten.
    lost: u64,
    seen: Seen,
}

impl Unread {
    /// Reads a CPU's log. A record that is not there was overwritten, or is being written over. The counter
    /// tells how many stores are among those.
    fn of(block: &SharedCpu, seen: &BTreeMap<u32, Seen>) -> Self {
        let seen = seen.get(&block.cpu).copied().unwrap_or_default();
        // Fewer records than seen: the hypervisor was unloaded and loaded again.
        let seen = if block.log_written < seen.records { Seen::default() } else { seen };
        let is_new = |sequence: u64| sequence > seen.records && sequence <= block.log_written;
        let (mut stores, mut missing) = (Vec::new(), block.log_written - seen.records);
        for record in block.log.iter().filter(|record| is_new(record.sequence)) {
            // The system above may scribble on the block.
            missing = missing.saturating_sub(1);
            if record.kind == LogKind::ForeignStore as u32 {
                stores.push(record.arguments);
            }
        }
        let read = seen.stores + stores.len() as u64;
        let counted = block.exits[ExitReason::ForeignStore as usize];
        let lost = if missing == 0 { 0 } else { counted.saturating_sub(read) };
        Self { stores, lost, seen: Seen { records: block.log_written, stores: read + lost } }
    }

    fn is_empty(&self) -> bool {
        self.stores.is_empty() && self.lost == 0
    }
}

/// News of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum News {
    Store(Store),
    /// Stores whose records were overwritten before they were read.
    Lost {
        cpu: u32,
        stores: u64,
    },
}

/// A store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Store {
    /// Part to which it was.
    part: String,
    address: u64,
    rip: u64,
    callers: Vec<u64>,
    cpu: u32,
}

impl News {
    /// Returns the finding; none for a mend of the driver's, and none for a part that is not there any more.
    #[must_use]
    pub fn finding(&self, symbols: &str, is_there: impl Fn(&String) -> bool) -> Option<Finding> {
        match self {
            Self::Store(store) if is_there(&store.part) => store.finding(symbols),
            Self::Store(_) => None,
            Self::Lost { cpu, stores } => {
                let what = if *stores == 1 { "a store" } else { &format!("{stores} stores") };
                let symbol = format!("{what} to unknown places, whose records were overwritten,");
                Some(finding(String::new(), symbol, "unknown", format!("unknown code, on CPU {cpu}")))
            }
        }
    }
}

impl Store {
    fn finding(&self, symbols: &str) -> Option<Finding> {
        let by = layout::name(symbols, self.rip);
        if by.ends_with("[mercury]") {
            return None;
        }
        let callers: String =
            self.callers.iter().map(|caller| format!(" < {}", layout::name(symbols, *caller))).collect();
        let address = format!("{:#x}", self.address);
        let symbol = layout::name(symbols, self.address);
        let part = layout::short(&self.part);
        Some(finding(address, symbol, part, format!("{by}{callers}, on CPU {}", self.cpu)))
    }
}

fn finding(address: String, symbol: String, part: &str, by: String) -> Finding {
    Finding {
        address,
        symbol,
        part: part.to_owned(),
        kind: KIND_OF_STORES.to_owned(),
        before: String::new(),
        found: String::new(),
        bits: 0,
        end: End::Reported,
        why: Some(by),
        time: now(),
    }
}

impl Stores {
    /// Returns the number of pages that are read-only beneath all attached CPUs.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.guarded
    }

    /// Returns true if the log has stores that were not read.
    #[must_use]
    pub fn has_news(&self) -> bool {
        !self.frames.is_empty() && blocks().iter().any(|block| !Unread::of(block, &self.seen).is_empty())
    }

    /// Returns stores since the last call, to pages that are read-only.
    pub fn news(&mut self) -> Vec<News> {
        self.read(&blocks())
    }

    fn read(&mut self, blocks: &[SharedCpu]) -> Vec<News> {
        let mut news = Vec::new();
        for block in blocks {
            let unread = Unread::of(block, &self.seen);
            let cpu = block.cpu;
            for [phys, rip, callers @ ..] in unread.stores {
                let Some((page, part)) = self.frames.get(&(phys & !(PAGE - 1))) else { continue };
                let callers = callers.into_iter().filter(|caller| *caller != 0).collect();
                let (part, address) = (part.clone(), page + phys % PAGE);
                news.push(News::Store(Store { part, address, rip, callers, cpu }));
            }
            if unread.lost > 0 && !self.frames.is_empty() {
                news.push(News::Lost { cpu, stores: unread.lost });
            }
            self.seen.insert(cpu, unread.seen);
        }
        if let Pages::ReadOnly { is_open, .. } = &mut self.pages {
            *is_open |= !news.is_empty();
        }
        news
    }

    /// Makes pages read-only again, as far as they are not, or are not known to be.
    ///
    /// # Errors
    ///
    /// Returns the reason if a store of an attached CPU may not be seen from now on.
    pub fn follow(
        &mut self,
        machine: &mut impl Machine,
        parts: &BTreeMap<String, Copied>,
    ) -> Result<(), String> {
        self.follow_names(machine, parts.keys().cloned().collect())
    }

    fn follow_names(&mut self, machine: &mut impl Machine, parts: Vec<String>) -> Result<(), String> {
        self.guarded = 0;
        let attached = attached(machine);
        if attached.is_empty() {
            self.pages = Pages::Unknown;
            return Err("no CPU is attached".to_owned());
        }
        match self.step(&attached, &parts) {
            Step::Nothing => {}
            step => self.make_read_only(machine, &attached, step)?,
        }
        self.parts = parts;
        self.judge(&self::attached(machine))
    }

    /// Decides what a pass has to do.
    fn step(&self, attached: &[SharedCpu], parts: &[String]) -> Step {
        let Pages::ReadOnly { number, is_open, .. } = &self.pages else { return Step::Begin };
        if attached.iter().any(|cpu| cpu.read_only != *number && cpu.read_only != READ_ONLY_LATER) {
            Step::Begin
        } else if *is_open || parts != self.parts {
            Step::Protect
        } else {
            Step::Nothing
        }
    }

    /// Makes pages read-only. If that fails, nothing is known of them, and the next pass begins anew.
    fn make_read_only(
        &mut self,
        machine: &mut impl Machine,
        attached: &[SharedCpu],
        step: Step,
    ) -> Result<(), String> {
        let before = std::mem::take(&mut self.pages);
        let frames = machine.frames()?;
        let number = match (step, before) {
            (Step::Protect, Pages::ReadOnly { number, .. }) => number,
            _ => begin(machine, attached)?,
        };
        self.frames = frames;
        let (count, missing) = protect(machine, attached[0].cpu, &self.frames);
        for cpu in attached {
            machine.call(cpu.cpu, IntegrityCall::Enter, 0, 0)?;
        }
        self.pages = Pages::ReadOnly { number, count, is_open: false, missing };
        Ok(())
    }

    /// Counts the pages that are read-only beneath these CPUs.
    fn judge(&mut self, attached: &[SharedCpu]) -> Result<(), String> {
        let Pages::ReadOnly { number, count, missing, .. } = &self.pages else {
            return Err("no page is read-only".to_owned());
        };
        if attached.iter().any(|cpu| cpu.read_only == READ_ONLY_LATER) {
            return Err(LATER.to_owned());
        }
        if let Some(cpu) = attached.iter().find(|cpu| cpu.read_only != *number) {
            return Err(format!("CPU {} runs without read-only pages until the next pass", cpu.cpu));
        }
        self.guarded = *count;
        missing.clone().map_or(Ok(()), Err)
    }
}

/// Tells the hypervisor how the kernel changes its code. Returns the number of the pages that follow. No CPU
/// has read-only pages meanwhile.
fn begin(machine: &mut impl Machine, attached: &[SharedCpu]) -> Result<u64, String> {
    let poking = machine.poking()?;
    let (number, first) = (machine.number(), attached[0].cpu);
    for cpu in attached {
        machine.call(cpu.cpu, IntegrityCall::Leave, 0, 0)?;
    }
    machine.call(first, IntegrityCall::Begin, poking.root, number)?;
    for (start, end) in poking.writers {
        machine.call(first, IntegrityCall::Writer, start, end)?;
    }
    Ok(number)
}

/// Makes pages read-only. Returns their number, and the first reason that some are not.
fn protect(machine: &mut impl Machine, cpu: u32, frames: &Frames) -> (u64, Option<String>) {
    let (mut pages, mut missing) = (0, None);
    for (start, count) in runs(frames.keys().copied()) {
        match machine.call(cpu, IntegrityCall::Protect, start, count) {
            Ok(()) => pages += count,
            Err(why) => missing = missing.or(Some(why)),
        }
    }
    (pages, missing)
}

/// The running machine.
pub struct Running<'a, M> {
    files: &'a Files,
    memory: &'a M,
    parts: &'a BTreeMap<String, Copied>,
    /// The driver, from the first call on.
    device: Option<Device>,
    symbols: Option<Rc<str>>,
}

impl<'a, M: Memory> Running<'a, M> {
    /// Returns the machine whose parts these are.
    pub fn new(files: &'a Files, memory: &'a M, parts: &'a BTreeMap<String, Copied>) -> Self {
        Self { files, memory, parts, device: None, symbols: None }
    }

    /// Returns the kernel's page tables, and its symbols.
    fn tables(&mut self) -> Result<(PageTables<'a, M>, Rc<str>), String> {
        let symbols = match self.symbols.take() {
            Some(symbols) => symbols,
            None => self.files.symbols().map_err(|error| error.to_string())?.into(),
        };
        self.symbols = Some(Rc::clone(&symbols));
        let levels =
            registers::read().first().map_or(4, |cpu| if cpu.cr4 & FIVE_LEVELS == 0 { 4 } else { 5 });
        let tables = PageTables::new(self.memory, &symbols, levels).map_err(|error| error.to_string())?;
        Ok((tables, symbols))
    }
}

impl<M: Memory> Machine for Running<'_, M> {
    fn published(&self) -> Vec<SharedCpu> {
        blocks()
    }

    fn call(&mut self, cpu: u32, call: IntegrityCall, first: u64, second: u64) -> Result<(), String> {
        let device = match self.device.take() {
            Some(device) => device,
            None => access::control_if_loaded()
                .map_err(|error| error.to_string())?
                .ok_or_else(|| "the driver is not loaded".to_owned())?,
        };
        let result = device.integrity(cpu, call, first, second);
        self.device = Some(device);
        result.map_err(|error| error.to_string())
    }

    fn poking(&mut self) -> Result<Poking, String> {
        let (mut tables, symbols) = self.tables()?;
        tables.poking(&symbols).map_err(|error| error.to_string())
    }

    fn frames(&mut self) -> Result<Frames, String> {
        let parts = self.parts.values().map(|copied| &copied.part);
        self.tables()?.0.frames(parts).map_err(|error| error.to_string())
    }

    fn number(&mut self) -> u64 {
        let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        u64::try_from(time.as_nanos()).unwrap_or_default().max(READ_ONLY_LATER + 1)
    }
}

/// Makes no page read-only any more. Without the driver there is none.
pub fn leave() {
    if let Ok(Some(device)) = access::control_if_loaded() {
        for block in blocks().iter().filter(|block| block.attached != 0) {
            let _ = device.integrity(block.cpu, IntegrityCall::Leave, 0, 0);
        }
    }
}

/// Returns what the hypervisor publishes; nothing without the driver.
fn blocks() -> Vec<SharedCpu> {
    access::observe().and_then(|device| device.shared()).unwrap_or_default()
}

/// Returns what attached CPUs publish.
fn attached(machine: &impl Machine) -> Vec<SharedCpu> {
    machine.published().into_iter().filter(|block| block.attached != 0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use mercury_abi::shared::{LOG_RECORDS, LogRecord};
    use mercury_control::fake::shared_cpu;

    const MODULE: u64 = 0xFFFF_FFFF_C000_0000;
    const FRAME: u64 = 0x1234_5000;
    const SYMBOLS: &str = "ffffffff81000000 T wild_store\nffffffff81000100 t caller\n\
        ffffffffc0000000 t victim\t[some]\nffffffffc0800000 t mercury_mend\t[mercury]\n";

    fn log(block: &mut SharedCpu, kind: LogKind, arguments: [u64; 5]) {
        let index = usize::try_from(block.log_written).expect("a number") % LOG_RECORDS;
        block.log_written += 1;
        let (sequence, cpu) = (block.log_written, block.cpu);
        block.log[index] = LogRecord { sequence, tsc: 7, kind: kind as u32, cpu, arguments };
    }

    pub(super) fn store(block: &mut SharedCpu, arguments: [u64; 5]) {
        block.exits[ExitReason::ForeignStore as usize] += 1;
        log(block, LogKind::ForeignStore, arguments);
    }

    /// Writes as many records that are none of stores.
    pub(super) fn flood(block: &mut SharedCpu, records: usize) {
        (0..records).for_each(|_| log(block, LogKind::Msr, [0; 5]));
    }

    fn stores() -> Stores {
        let frames = BTreeMap::from([(FRAME, (MODULE, "some@7".to_owned()))]);
        let pages = Pages::ReadOnly { number: 9, count: 1, is_open: false, missing: None };
        Stores { frames, pages, ..Stores::default() }
    }

    fn is_open(stores: &Stores) -> bool {
        matches!(stores.pages, Pages::ReadOnly { is_open: true, .. })
    }

    #[test]
    fn a_store_is_told_once_with_its_maker() {
        let (mut stores, mut block) = (stores(), shared_cpu(1));
        log(&mut block, LogKind::Attached, [0; 5]);
        store(&mut block, [0x1234_5123, 0xFFFF_FFFF_8100_0010, 0xFFFF_FFFF_8100_0105, 0, 0]);
        // A page that is none of the parts' any more.
        store(&mut block, [0x7777_7000, 0xFFFF_FFFF_8100_0010, 0, 0, 0]);
        let news = stores.read(&[block]);
        assert!(is_open(&stores));
        let finding = news[0].finding(SYMBOLS, |part| part == "some@7").expect("a finding");
        assert_eq!((news.len(), finding.event(), finding.part.as_str()), (1, "code-written", "some"));
        let text =
            "a store to victim+0x123 [some] (0xffffffffc0000123) by wild_store+0x10 < caller+0x5, on CPU 1";
        assert_eq!(finding.text(), text);
        assert_eq!(news[0].finding(SYMBOLS, |_| false), None, "the module has gone");
        assert_eq!(stores.read(&[block]), []);
        // The hypervisor was loaded again.
        let mut fresh = shared_cpu(1);
        store(&mut fresh, [FRAME, 1, 0, 0, 0]);
        assert_eq!(stores.read(&[fresh]).len(), 1);
    }

    /// The ring has 64 records. A store whose record was overwritten is told as one, to an unknown place.
    #[test]
    fn a_record_that_was_overwritten_is_no_quiet() {
        let (mut stores, mut block) = (stores(), shared_cpu(1));
        flood(&mut block, 3);
        assert_eq!(stores.read(&[block]), []);
        store(&mut block, [FRAME, 1, 0, 0, 0]);
        store(&mut block, [FRAME, 1, 0, 0, 0]);
        flood(&mut block, LOG_RECORDS - 1);
        assert!(!Unread::of(&block, &stores.seen).is_empty());
        let news = stores.read(&[block]);
        let lost = News::Lost { cpu: 1, stores: 1 };
        assert!(news.len() == 2 && news.contains(&lost) && is_open(&stores), "{news:?}");
        let finding = lost.finding(SYMBOLS, |_| true).expect("a finding");
        let text = "a store to unknown places, whose records were overwritten, by unknown code, on CPU 1";
        assert_eq!((finding.text().as_str(), finding.event()), (text, "code-written"));
        // Each is told once, and records of another kind may be lost.
        flood(&mut block, 10 * LOG_RECORDS);
        assert!(Unread::of(&block, &stores.seen).is_empty());
        assert_eq!(stores.read(&[block]), []);
    }

    /// The hypervisor writes over a record that was not read, while it is copied.
    #[test]
    fn a_torn_record_of_a_store_is_no_quiet() {
        let (mut stores, mut block) = (stores(), shared_cpu(0));
        store(&mut block, [FRAME, 1, 0, 0, 0]);
        block.log[0].sequence = 0;
        assert_eq!(stores.read(&[block]), [News::Lost { cpu: 0, stores: 1 }]);
    }

    #[test]
    fn records_from_before_the_watch_are_not_told() {
        let (mut stores, mut block) = (Stores::default(), shared_cpu(0));
        store(&mut block, [FRAME, 1, 0, 0, 0]);
        flood(&mut block, 2 * LOG_RECORDS);
        assert_eq!(stores.read(&[block]), []);
        stores.frames = BTreeMap::from([(FRAME, (MODULE, "some@7".to_owned()))]);
        assert_eq!(stores.read(&[block]), []);
    }

    #[test]
    fn a_mend_of_the_drivers_is_no_finding() {
        let (mut stores, mut block) = (stores(), shared_cpu(0));
        store(&mut block, [FRAME, 0xFFFF_FFFF_C080_0010, 0, 0, 0]);
        let news = stores.read(&[block]);
        assert_eq!((news.len(), news[0].finding(SYMBOLS, |_| true)), (1, None));
        assert!(is_open(&stores), "it is made read-only again");
    }
}
