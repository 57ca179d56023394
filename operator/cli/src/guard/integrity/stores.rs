//! Stores to code and constants, seen while they are made. On an attached machine their pages are read-only
//! in the nested tables. The hypervisor logs a store of other code than the kernel's own, lets it through,
//! and lets the page be written from then on. A pass reads the log, mends, and makes the pages read-only
//! again.

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
    shared::{ExitReason, LogKind, SharedCpu},
};
use mercury_control::{access, device::Device, driver::Driver};
use std::collections::BTreeMap;

/// CR4.LA57: page tables of five levels.
const FIVE_LEVELS: u64 = 1 << 12;

/// Read-only pages, and the log of stores to them.
#[derive(Debug, Default)]
pub struct Stores {
    /// Pages by their physical address: address, and part.
    frames: BTreeMap<u64, (u64, String)>,
    /// CPUs that were attached when the pages were made read-only.
    attached: Vec<Attached>,
    /// Names of the parts that were there then.
    parts: Vec<String>,
    /// Number of pages that are read-only.
    pages: u64,
    /// Number of the last record of each CPU that was read.
    seen: BTreeMap<u32, u64>,
    /// True if a page can be written again.
    is_open: bool,
}

/// A CPU that is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Attached {
    cpu: u32,
    /// Number of its attaches since the hypervisor was loaded.
    attaches: u64,
    /// Number of the driver's calls there since then.
    calls: u64,
}

impl Attached {
    /// Returns true if the CPU was attached all the time since then. A hypervisor that was loaded anew has
    /// answered fewer calls.
    fn is_still(&self, then: &Self) -> bool {
        (self.cpu, self.attaches) == (then.cpu, then.attaches) && self.calls >= then.calls
    }
}

/// A store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Store {
    /// Part to which it was.
    pub part: String,
    address: u64,
    rip: u64,
    callers: Vec<u64>,
    cpu: u32,
}

impl Store {
    /// Returns the finding; none for a mend of the driver's.
    #[must_use]
    pub fn finding(&self, symbols: &str) -> Option<Finding> {
        let by = layout::name(symbols, self.rip);
        if by.ends_with("[mercury]") {
            return None;
        }
        let callers: String =
            self.callers.iter().map(|caller| format!(" < {}", layout::name(symbols, *caller))).collect();
        Some(Finding {
            address: format!("{:#x}", self.address),
            symbol: layout::name(symbols, self.address),
            part: layout::short(&self.part).to_owned(),
            kind: KIND_OF_STORES.to_owned(),
            before: String::new(),
            found: String::new(),
            bits: 0,
            end: End::Reported,
            why: Some(format!("{by}{callers}, on CPU {}", self.cpu)),
            time: now(),
        })
    }
}

impl Stores {
    /// Returns the number of read-only pages.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Returns true if the log has stores that were not read.
    #[must_use]
    pub fn has_news(&self) -> bool {
        self.pages > 0 && blocks().iter().any(|block| new_records(block, &self.seen).next().is_some())
    }

    /// Returns stores since the last call, to pages that are read-only.
    pub fn news(&mut self) -> Vec<Store> {
        self.read(&blocks())
    }

    fn read(&mut self, blocks: &[SharedCpu]) -> Vec<Store> {
        let mut news = Vec::new();
        for block in blocks {
            for [phys, rip, callers @ ..] in new_records(block, &self.seen) {
                let Some((page, part)) = self.frames.get(&(phys & !(PAGE - 1))) else { continue };
                self.is_open = true;
                news.push(Store {
                    part: part.clone(),
                    address: page + phys % PAGE,
                    rip,
                    callers: callers.into_iter().filter(|caller| *caller != 0).collect(),
                    cpu: block.cpu,
                });
            }
            self.seen.insert(block.cpu, block.log_written);
        }
        news
    }

    /// Makes pages read-only, if CPUs or parts have come or gone, or a page can be written again.
    ///
    /// # Errors
    ///
    /// Returns the reason if no page is read-only, or not all of them.
    pub fn follow(
        &mut self,
        files: &Files,
        memory: &impl Memory,
        parts: &BTreeMap<String, Copied>,
    ) -> Result<(), String> {
        let attached = attached(&blocks());
        if attached.is_empty() {
            *self = Self { seen: std::mem::take(&mut self.seen), ..Self::default() };
            return Err("no CPU is attached".to_owned());
        }
        let same_cpus = attached.len() == self.attached.len()
            && attached.iter().zip(&self.attached).all(|(cpu, then)| cpu.is_still(then));
        let same_parts = parts.keys().eq(self.parts.iter());
        if same_cpus && same_parts && !self.is_open {
            return Ok(());
        }
        let device = access::control_if_loaded().map_err(|error| error.to_string())?;
        let device = device.ok_or_else(|| "the driver is not loaded".to_owned())?;
        let symbols = files.symbols().map_err(|error| error.to_string())?;
        let levels =
            registers::read().first().map_or(4, |cpu| if cpu.cr4 & FIVE_LEVELS == 0 { 4 } else { 5 });
        let mut tables = PageTables::new(memory, &symbols, levels).map_err(|error| error.to_string())?;
        if !same_cpus {
            let poking = tables.poking(&symbols).map_err(|error| error.to_string())?;
            begin(&device, &attached, &poking).map_err(|error| error.to_string())?;
        }
        let frames = tables.frames(parts.values().map(|copied| &copied.part));
        self.frames = frames.map_err(|error| error.to_string())?;
        let (pages, result) = protect(&device, &attached, &self.frames);
        self.pages = pages;
        // With the calls that were made meanwhile.
        self.attached = self::attached(&blocks());
        self.is_open = self.attached.len() != attached.len();
        self.parts = parts.keys().cloned().collect();
        result
    }
}

/// Tells the hypervisor how the kernel changes its code. No CPU has read-only pages meanwhile.
fn begin(device: &Device, attached: &[Attached], poking: &Poking) -> mercury_control::error::Result<()> {
    for Attached { cpu, .. } in attached {
        device.integrity(*cpu, IntegrityCall::Leave, 0, 0)?;
    }
    let Some(Attached { cpu, .. }) = attached.first() else { return Ok(()) };
    device.integrity(*cpu, IntegrityCall::Begin, poking.root, 0)?;
    poking
        .writers
        .iter()
        .try_for_each(|(start, end)| device.integrity(*cpu, IntegrityCall::Writer, *start, *end))
}

/// Makes pages read-only on all CPUs. Returns their number, and the first error.
fn protect(
    device: &Device,
    attached: &[Attached],
    frames: &BTreeMap<u64, (u64, String)>,
) -> (u64, Result<(), String>) {
    let (mut pages, mut result) = (0, Ok(()));
    let Some(Attached { cpu: first, .. }) = attached.first() else { return (0, result) };
    for (start, count) in runs(frames.keys().copied()) {
        match device.integrity(*first, IntegrityCall::Protect, start, count) {
            Ok(()) => pages += count,
            Err(error) => result = result.and(Err(error.to_string())),
        }
    }
    for Attached { cpu, .. } in attached {
        if let Err(error) = device.integrity(*cpu, IntegrityCall::Enter, 0, 0) {
            return (0, Err(error.to_string()));
        }
    }
    (pages, result)
}

/// Makes no page read-only any more. Without the driver there is none.
pub fn leave() {
    if let Ok(Some(device)) = access::control_if_loaded() {
        for Attached { cpu, .. } in attached(&blocks()) {
            let _ = device.integrity(cpu, IntegrityCall::Leave, 0, 0);
        }
    }
}

/// Returns what the hypervisor publishes; nothing without the driver.
fn blocks() -> Vec<SharedCpu> {
    access::observe().and_then(|device| device.shared()).unwrap_or_default()
}

/// Returns the CPUs that are attached.
fn attached(blocks: &[SharedCpu]) -> Vec<Attached> {
    let of = |block: &SharedCpu| Attached {
        cpu: block.cpu,
        attaches: block.attaches,
        calls: block.exits[ExitReason::Hypercall as usize],
    };
    blocks.iter().filter(|block| block.attached != 0).map(of).collect()
}

/// Returns the arguments of stores in a CPU's log that were not read.
fn new_records<'a>(
    block: &'a SharedCpu,
    seen: &BTreeMap<u32, u64>,
) -> impl Iterator<Item = [u64; 5]> + use<'a> {
    let seen = seen.get(&block.cpu).copied().unwrap_or(0);
    // Fewer records than seen: the hypervisor was unloaded and loaded again.
    let seen = if block.log_written < seen { 0 } else { seen };
    let is_new = move |sequence: u64| sequence > seen && sequence <= block.log_written;
    let records = block.log.iter().filter(move |record| is_new(record.sequence));
    records.filter(|record| record.kind == LogKind::ForeignStore as u32).map(|record| record.arguments)
}

#[cfg(test)]
mod tests {
    use super::*;
    use mercury_abi::shared::{LOG_RECORDS, LogRecord};
    use mercury_control::fake::shared_cpu;

    const MODULE: u64 = 0xFFFF_FFFF_C000_0000;
    const SYMBOLS: &str = "ffffffff81000000 T wild_store\nffffffff81000100 t caller\n\
        ffffffffc0000000 t victim\t[some]\nffffffffc0800000 t mercury_mend\t[mercury]\n";

    fn log(block: &mut SharedCpu, kind: LogKind, arguments: [u64; 5]) {
        let index = usize::try_from(block.log_written).expect("a number") % LOG_RECORDS;
        block.log_written += 1;
        let (sequence, cpu) = (block.log_written, block.cpu);
        block.log[index] = LogRecord { sequence, tsc: 7, kind: kind as u32, cpu, arguments };
    }

    fn stores() -> Stores {
        let frames = BTreeMap::from([(0x1234_5000, (MODULE, "some@7".to_owned()))]);
        Stores { frames, pages: 1, ..Stores::default() }
    }

    #[test]
    fn a_store_is_told_once_with_its_maker() {
        let (mut stores, mut block) = (stores(), shared_cpu(1));
        log(&mut block, LogKind::Attached, [0; 5]);
        log(
            &mut block,
            LogKind::ForeignStore,
            [0x1234_5123, 0xFFFF_FFFF_8100_0010, 0xFFFF_FFFF_8100_0105, 0, 0],
        );
        // A page that is none of the parts' any more.
        log(&mut block, LogKind::ForeignStore, [0x7777_7000, 0xFFFF_FFFF_8100_0010, 0, 0, 0]);
        let news = stores.read(&[block]);
        assert!(stores.is_open);
        let finding = news[0].finding(SYMBOLS).expect("a finding");
        assert_eq!((news.len(), finding.event(), finding.part.as_str()), (1, "code-written", "some"));
        let text =
            "a store to victim+0x123 [some] (0xffffffffc0000123) by wild_store+0x10 < caller+0x5, on CPU 1";
        assert_eq!(finding.text(), text);
        assert_eq!(stores.read(&[block]), []);
        // The hypervisor was loaded again.
        let mut fresh = shared_cpu(1);
        log(&mut fresh, LogKind::ForeignStore, [0x1234_5000, 1, 0, 0, 0]);
        assert_eq!(stores.read(&[fresh]).len(), 1);
    }

    #[test]
    fn a_hypervisor_that_was_loaded_anew_has_no_pages() {
        let mut block = shared_cpu(0);
        (block.attached, block.attaches) = (1, 1);
        block.exits[ExitReason::Hypercall as usize] = 300;
        let then = attached(&[block, shared_cpu(1)]);
        assert_eq!(then.len(), usize::from(shared_cpu(1).attached != 0) + 1);
        block.exits[ExitReason::Hypercall as usize] = 301;
        assert!(attached(&[block])[0].is_still(&then[0]));
        block.exits[ExitReason::Hypercall as usize] = 7;
        assert!(!attached(&[block])[0].is_still(&then[0]));
        (block.attaches, block.exits[ExitReason::Hypercall as usize]) = (2, 302);
        assert!(!attached(&[block])[0].is_still(&then[0]), "it was native meanwhile");
    }

    #[test]
    fn a_mend_of_the_drivers_is_no_finding() {
        let (mut stores, mut block) = (stores(), shared_cpu(0));
        log(&mut block, LogKind::ForeignStore, [0x1234_5000, 0xFFFF_FFFF_C080_0010, 0, 0, 0]);
        let news = stores.read(&[block]);
        assert_eq!((news.len(), news[0].finding(SYMBOLS)), (1, None));
        assert!(stores.is_open, "it is made read-only again");
    }
}
