//! A pass over code and constants.

use super::{
    copy::{self, Block, Copy, Hash, hash},
    layout::{self, Files},
    memory::Kcore,
    registers::{self, Registers},
    report::{End, Finding, State, now},
    sites::{Sites, Verdict, View, probe_addresses},
    stores::{self, Stores},
};
use mercury_control::{access, error::Result};
use rustix::{
    fs::{Mode, OFlags},
    mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io::{self, Read},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

/// Places of a block up to which they are mended.
const MENDED_MAX: usize = 16;
/// Time between the two readings that a finding needs.
const SECOND_LOOK: Duration = Duration::from_millis(200);
/// Bytes that have to be as they were when they are mended: the byte and its neighbours.
const WINDOW: u64 = 16;
/// File with the addresses of kprobes at the time of the copy.
const PROBES: &str = "probes";

/// Compares memory with the copy.
#[derive(Debug)]
pub struct Scrubber {
    folder: PathBuf,
    files: Files,
    memory: Kcore,
    copy: Copy,
    old_probes: Vec<u64>,
    registers: Registers,
    /// Stores to code and constants, if they are watched.
    stores: Option<Stores>,
    /// Places at which the kernel changes its code, as they were when they were needed last.
    sites: Option<Sites>,
    /// Hashes of blocks whose differences are all the kernel's own.
    accepted: BTreeMap<u64, Hash>,
    /// Findings that were reported, by address and bytes.
    reported: BTreeSet<(u64, Vec<u8>)>,
    /// Places that the kernel was changing in the last pass.
    under_way: BTreeSet<u64>,
    state: State,
}

/// A block that differs.
#[derive(Clone, Debug)]
struct Suspect {
    part: String,
    block: Block,
    old: Vec<u8>,
    now: Vec<u8>,
}

/// Neighbouring bytes that differ and are nobody's.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Odd {
    start: u64,
    now: Vec<u8>,
    wanted: Vec<u8>,
    unclaimed: bool,
}

/// What a suspect turned out to be.
#[derive(Debug, Default)]
struct Judged {
    odd: Vec<Odd>,
    under_way: Vec<u64>,
    own: u64,
}

impl Scrubber {
    /// Opens the copy in a folder. Copies all parts that it has not.
    ///
    /// # Errors
    ///
    /// Returns an error if the kernel's memory cannot be read, or there is no room.
    pub fn open(folder: &Path) -> io::Result<Self> {
        let files = Files::default();
        refuse_counted_calls(Path::new("/sys/devices/system/cpu/vulnerabilities/retbleed"))?;
        let memory = kcore(&files)?;
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
        let copy = Copy::open(folder, &boot)?;
        let mut scrubber = Self {
            folder: folder.to_owned(),
            state: State::read(folder).unwrap_or_default(),
            old_probes: Vec::new(),
            registers: Registers::open(folder),
            stores: None,
            sites: None,
            accepted: BTreeMap::new(),
            reported: BTreeSet::new(),
            under_way: BTreeSet::new(),
            files,
            memory,
            copy,
        };
        let _lock = scrubber.lock()?;
        scrubber.old_probes = scrubber.note_probes()?;
        if !scrubber.copy.parts.contains_key("kernel") {
            let kernel = scrubber.files.kernel()?;
            scrubber.copy.add(kernel, &scrubber.memory)?;
        }
        scrubber.follow_modules()?;
        scrubber.write_state()?;
        Ok(scrubber)
    }

    /// Returns what the passes so far have found.
    #[must_use]
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Reads in advance what the first finding would have to wait for.
    ///
    /// # Errors
    ///
    /// Returns an error if a table cannot be read.
    pub fn prepare(&mut self) -> Result<()> {
        self.sites = Some(self.sites().map_err(super::unreadable)?.0);
        Ok(())
    }

    /// Sees stores to code and constants from the next pass on.
    pub fn watch_stores(&mut self) {
        self.stores = Some(Stores::default());
    }

    /// Returns true if there were stores since the last pass.
    #[must_use]
    pub fn has_stores(&self) -> bool {
        self.stores.as_ref().is_some_and(Stores::has_news)
    }

    /// Sees no stores any more.
    ///
    /// # Errors
    ///
    /// Returns an error if the state cannot be written.
    pub fn leave_stores(&mut self) -> io::Result<()> {
        if self.stores.take().is_none() {
            return Ok(());
        }
        stores::leave();
        let _lock = self.lock()?;
        self.state = State::read(&self.folder).unwrap_or_default();
        (self.state.guarded, self.state.not_guarded) = (0, None);
        self.write_state()
    }

    /// Returns false after `mercury guard off`.
    #[must_use]
    pub fn is_there(&self) -> bool {
        self.copy.is_there()
    }

    /// Compares everything once. Returns what is new.
    ///
    /// # Errors
    ///
    /// Returns an error if memory or the copy cannot be read.
    pub fn pass(&mut self, mends: bool) -> Result<Vec<Finding>> {
        let findings = self.locked_pass(mends);
        findings.map_err(super::unreadable)
    }

    fn locked_pass(&mut self, mends: bool) -> io::Result<Vec<Finding>> {
        let began = Instant::now();
        let _lock = self.lock()?;
        // Another process may have made passes.
        self.state = State::read(&self.folder).unwrap_or_default();
        self.memory = kcore(&self.files)?;
        self.follow_modules()?;
        let mut findings = self.new_stores()?;
        let suspects = self.suspects()?;
        self.state.own_changes = 0;
        if suspects.is_empty() {
            self.under_way.clear();
        } else {
            findings.extend(self.look_closely(suspects, mends)?);
        }
        if let Some(stores) = self.stores.as_mut() {
            self.state.not_guarded = stores.follow(&self.files, &self.memory, &self.copy.parts).err();
            self.state.guarded = stores.pages();
        }
        let (changed, cpus) = self.registers.compare(registers::read, || thread::sleep(SECOND_LOOK))?;
        findings.extend(changed);
        self.state.cpus = cpus;
        self.state.passes += 1;
        self.state.last_pass = now();
        self.state.last_pass_ms = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.state.add(&findings);
        self.write_state()?;
        Ok(findings)
    }

    /// Returns stores to parts that are still there.
    fn new_stores(&mut self) -> io::Result<Vec<Finding>> {
        let Some(stores) = self.stores.as_mut() else { return Ok(Vec::new()) };
        let news = stores.news();
        if news.is_empty() {
            return Ok(Vec::new());
        }
        let symbols = self.files.symbols()?;
        let is_there = |store: &&stores::Store| self.copy.parts.contains_key(&store.part);
        let told = news.iter().filter(is_there).filter_map(|store| store.finding(&symbols));
        Ok(told.collect())
    }

    fn lock(&self) -> io::Result<File> {
        let lock = File::create(self.folder.join("lock"))?;
        lock.lock()?;
        Ok(lock)
    }

    fn write_state(&mut self) -> io::Result<()> {
        (self.state.bytes, self.state.copy_bytes) = self.copy.size();
        self.state.parts = self.copy.parts.len();
        self.state.write(&self.folder)
    }

    /// Notes the kprobes that the copy contains. Returns them.
    fn note_probes(&self) -> io::Result<Vec<u64>> {
        let file = self.folder.join(PROBES);
        if !self.copy.parts.contains_key("kernel") {
            fs::write(&file, probes())?;
        }
        Ok(probe_addresses(&fs::read_to_string(file)?))
    }

    /// Copies modules that have come, and forgets those that have gone.
    fn follow_modules(&mut self) -> io::Result<()> {
        let before: BTreeSet<_> = self.copy.parts.keys().cloned().collect();
        let mut names = self.files.modules()?;
        for name in &names {
            if self.copy.parts.contains_key(name) {
                continue;
            }
            let added =
                self.files.module(name, &self.memory).and_then(|part| self.copy.add(part, &self.memory));
            match added {
                // It has gone meanwhile.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                added => added?,
            }
        }
        names.push("kernel".to_owned());
        self.copy.keep(&names);
        let is_known = |name: &String| before.contains(name);
        if before.len() != self.copy.parts.len() || !self.copy.parts.keys().all(is_known) {
            self.sites = None;
        }
        Ok(())
    }

    /// Returns the blocks that are not as they were in the last pass.
    fn suspects(&mut self) -> io::Result<Vec<Suspect>> {
        let mut suspects = Vec::new();
        for (name, copied) in &self.copy.parts {
            for block in &copied.blocks {
                let now = copy::read(&self.memory, block)?;
                let hash = hash(&now);
                if hash == block.hash || self.accepted.get(&block.start) == Some(&hash) {
                    continue;
                }
                let old = self.copy.content(name, block)?;
                suspects.push(Suspect { part: name.clone(), block: block.clone(), old, now });
            }
        }
        Ok(suspects)
    }

    /// Judges suspects twice, some time apart, and mends what is nobody's.
    fn look_closely(&mut self, suspects: Vec<Suspect>, mends: bool) -> io::Result<Vec<Finding>> {
        // Reading all symbols takes time, and places seldom change. What is odd is judged by new ones.
        let sites = match self.sites.take() {
            Some(sites) => sites,
            None => self.sites()?.0,
        };
        let first: Vec<_> = suspects.iter().map(|suspect| judge(&sites, suspect)).collect();
        self.sites = Some(sites);
        self.accept(&suspects, &first);
        let is_well = |judged: &Judged| judged.odd.is_empty() && judged.under_way.is_empty();
        if first.iter().all(is_well) {
            self.under_way.clear();
            return Ok(Vec::new());
        }
        thread::sleep(SECOND_LOOK);
        self.memory = kcore(&self.files)?;
        let (sites, symbols) = self.sites()?;
        let there = self.files.modules()?;
        let (mut findings, mut under_way) = (Vec::new(), BTreeSet::new());
        for (mut suspect, first) in suspects.into_iter().zip(&first).filter(|(_, judged)| !is_well(judged)) {
            if suspect.part != "kernel" && !there.contains(&suspect.part) {
                continue;
            }
            suspect.now = copy::read(&self.memory, &suspect.block)?;
            let second = judge(&sites, &suspect);
            let stuck = |at: &&u64| first.under_way.contains(*at) && self.under_way.contains(*at);
            let stuck = second.under_way.iter().filter(stuck).map(|at| unclaimed(&suspect, *at));
            let odd = second.odd.iter().filter(|odd| first.odd.contains(odd)).cloned().chain(stuck);
            // What was not there at the first look is judged at the next pass.
            let is_known = second.odd.iter().all(|odd| first.odd.contains(odd));
            let mut is_final = second.under_way.is_empty() && is_known;
            let odd: Vec<_> = odd.collect();
            // So much is no flip: the copy may be that of another place.
            let mends = mends && odd.len() <= MENDED_MAX;
            for odd in odd {
                is_final &= odd.unclaimed || !mends;
                findings.extend(self.settle(&suspect, &odd, &symbols, mends));
            }
            if is_final {
                self.accepted.insert(suspect.block.start, hash(&suspect.now));
            }
            under_way.extend(second.under_way);
        }
        self.under_way = under_way;
        self.sites = Some(sites);
        Ok(findings)
    }

    /// Notes blocks whose differences are all the kernel's own.
    fn accept(&mut self, suspects: &[Suspect], judged: &[Judged]) {
        for (suspect, judged) in suspects.iter().zip(judged) {
            self.state.own_changes += judged.own;
            if judged.odd.is_empty() && judged.under_way.is_empty() {
                self.accepted.insert(suspect.block.start, hash(&suspect.now));
            }
        }
    }

    fn sites(&self) -> io::Result<(Sites, String)> {
        let symbols = self.files.symbols()?;
        let parts = self.copy.parts.values().map(|copied| &copied.part);
        let sites = Sites::collect(&self.memory, &symbols, &probes(), &self.old_probes, parts)?;
        Ok((sites, symbols))
    }

    /// Mends bytes if that is wanted. Returns the finding if it is new.
    fn settle(&mut self, suspect: &Suspect, odd: &Odd, symbols: &str, mends: bool) -> Option<Finding> {
        let is_new = self.reported.insert((odd.start, odd.now.clone()));
        let (end, why) = match (odd.unclaimed, mends) {
            (true, _) => (End::Unclaimed, None),
            (false, false) => (End::Reported, None),
            (false, true) => match mend(odd) {
                Ok(()) => {
                    // The same may happen again.
                    self.reported.remove(&(odd.start, odd.now.clone()));
                    (End::Mended, None)
                }
                Err(why) => (End::NotMended, Some(why)),
            },
        };
        (is_new || end == End::Mended).then(|| finding(suspect, odd, symbols, end, why))
    }
}

/// Refuses a kernel that counts calls (retbleed=stuff): its calls go to padding before the functions, and
/// forms of static calls are not known.
fn refuse_counted_calls(report: &Path) -> io::Result<()> {
    if fs::read_to_string(report).unwrap_or_default().contains("Stuffing") {
        return Err(io::Error::other("the kernel counts calls (retbleed=stuff), and patches them for that"));
    }
    Ok(())
}

/// Opens the kernel's memory. Places in that file change when memory is plugged in.
fn kcore(files: &Files) -> io::Result<Kcore> {
    Kcore::open(&files.proc.join("kcore"))
}

/// Has the driver mend bytes.
fn mend(odd: &Odd) -> std::result::Result<(), String> {
    let device = access::control_if_loaded().map_err(|error| error.to_string())?;
    let device = device.ok_or_else(|| "the driver is not loaded".to_owned())?;
    device.mend(odd.start, &odd.now, &odd.wanted).map_err(|error| error.to_string())
}

fn finding(suspect: &Suspect, odd: &Odd, symbols: &str, end: End, why: Option<String>) -> Finding {
    let from = usize::try_from(odd.start - suspect.block.from).unwrap_or_default();
    let old = if odd.unclaimed { &suspect.old[from..from + odd.now.len()] } else { &odd.wanted[..] };
    let differ = |at: &usize| old[*at] != odd.now[*at];
    let first = (0..old.len()).find(differ).unwrap_or_default();
    let last = (0..old.len()).rfind(differ).unwrap_or_default();
    let hex = |bytes: &[u8]| bytes[first..=last].iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let address = odd.start + first as u64;
    Finding {
        address: format!("{address:#x}"),
        symbol: layout::name(symbols, address),
        part: layout::short(&suspect.part).to_owned(),
        kind: if suspect.block.is_code { "code" } else { "constants" }.to_owned(),
        before: hex(old),
        found: hex(&odd.now),
        bits: old.iter().zip(&odd.now).map(|(a, b)| (a ^ b).count_ones()).sum(),
        end,
        why,
        time: now(),
    }
}

/// Returns the window round an address, of memory.
fn window(suspect: &Suspect, address: u64) -> (u64, Vec<u8>) {
    let start = (address & !(WINDOW - 1)).max(suspect.block.from);
    let end = ((address & !(WINDOW - 1)) + WINDOW).min(suspect.block.until);
    let at = |address: u64| usize::try_from(address - suspect.block.from).unwrap_or_default();
    (start, suspect.now[at(start)..at(end)].to_vec())
}

fn unclaimed(suspect: &Suspect, address: u64) -> Odd {
    let (start, now) = window(suspect, address);
    Odd { start, wanted: now.clone(), now, unclaimed: true }
}

/// Judges each byte of a block that differs.
fn judge(sites: &Sites, suspect: &Suspect) -> Judged {
    let Suspect { block, old, now, .. } = suspect;
    let view = View { start: block.from, old, now };
    let mut judged = Judged::default();
    let differ = (block.from..).zip(old.iter().zip(now)).filter(|(_, (old, now))| old != now);
    for (address, (old, _)) in differ.filter(|(address, _)| (block.start..block.end).contains(address)) {
        let verdict = if block.is_code { sites.judge(&view, address) } else { Verdict::Foreign(*old) };
        match verdict {
            Verdict::Own => judged.own += 1,
            Verdict::UnderWay => judged.under_way.push(address),
            Verdict::Unclaimed => add(&mut judged.odd, unclaimed(suspect, address)),
            Verdict::Foreign(byte) => {
                let (start, now) = window(suspect, address);
                let mut wanted = now.clone();
                wanted[usize::try_from(address - start).unwrap_or_default()] = byte;
                add(&mut judged.odd, Odd { start, now, wanted, unclaimed: false });
            }
        }
    }
    judged
}

/// Adds odd bytes. Those of one window are one; if one of them is unclaimed, all are.
fn add(all: &mut Vec<Odd>, odd: Odd) {
    let Some(known) = all.last_mut().filter(|known| known.start == odd.start) else { return all.push(odd) };
    known.unclaimed |= odd.unclaimed;
    for (at, byte) in odd.wanted.iter().enumerate().filter(|(at, byte)| odd.now[*at] != **byte) {
        known.wanted[at] = *byte;
    }
}

/// Returns the kernel's list of kprobes; empty if it has none. debugfs need not be mounted.
fn probes() -> String {
    let read = || -> io::Result<String> {
        let context = fsopen("debugfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
        fsconfig_create(&context)?;
        let root = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())?;
        let file =
            rustix::fs::openat(&root, "kprobes/list", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        let mut text = String::new();
        File::from(file).read_to_string(&mut text)?;
        Ok(text)
    };
    read().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guard::integrity::{layout::Part, layout::Range, memory::Memory};
    use std::cell::RefCell;

    const START: u64 = 0xFFFF_FFFF_8100_0000;

    /// Memory of the test's.
    struct Bytes(RefCell<Vec<u8>>);

    impl Memory for Bytes {
        fn read(&self, address: u64, to: &mut [u8]) -> io::Result<()> {
            let at = usize::try_from(address - START).map_err(io::Error::other)?;
            to.copy_from_slice(&self.0.borrow()[at..at + to.len()]);
            Ok(())
        }
    }

    /// Copies 200 KB, changes them, and judges all blocks that differ.
    fn odd(change: impl FnOnce(&mut [u8])) -> Vec<Odd> {
        let folder = tempfile::tempdir().expect("a folder");
        let memory = Bytes(RefCell::new((0..200_000_u32).map(|at| (at % 251) as u8 | 1).collect()));
        let mut copy = Copy::open(folder.path(), "boot").expect("a copy");
        let range = Range { start: START, end: START + 200_000, is_code: true };
        let part = Part { name: "kernel".into(), ranges: vec![range], jumps: (0, 0), calls: (0, 0) };
        copy.add(part, &memory).expect("a copy");
        change(&mut memory.0.borrow_mut());
        // As another process reads it.
        let copy = Copy::open(folder.path(), "boot").expect("the copy");
        let mut all = Vec::new();
        for block in &copy.parts["kernel"].blocks {
            let now = copy::read(&memory, block).expect("bytes");
            if hash(&now) != block.hash {
                let old = copy.content("kernel", block).expect("the copy");
                let suspect = Suspect { part: "kernel".into(), block: block.clone(), old, now };
                all.extend(judge(&Sites::default(), &suspect).odd);
            }
        }
        all
    }

    #[test]
    fn a_kernel_that_counts_calls_is_refused() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        fs::write(file.path(), "Mitigation: Stuffing\n").expect("a file");
        assert!(refuse_counted_calls(file.path()).is_err());
        fs::write(file.path(), "Mitigation: IBRS\n").expect("a file");
        assert!(refuse_counted_calls(file.path()).is_ok());
        assert!(refuse_counted_calls(Path::new("/nonexistent")).is_ok());
    }

    #[test]
    fn nothing_is_odd_about_the_same_bytes() {
        assert_eq!(odd(|_| ()), []);
    }

    /// At the edge of two blocks, which both hold the byte.
    #[test]
    fn each_byte_is_found_once() {
        for at in [0, 5, 0xFFFF, 0x1_0000, 0x1_0001, 199_999] {
            let found = odd(|bytes| bytes[at] ^= 0x20);
            assert_eq!(found.len(), 1, "{at:#x}: {found:?}");
            let (odd, place) = (&found[0], START + at as u64);
            assert!(odd.start <= place && place < odd.start + odd.now.len() as u64, "{odd:?}");
            let wrong = usize::try_from(place - odd.start).expect("an offset");
            assert_eq!(odd.wanted[wrong], odd.now[wrong] ^ 0x20);
            assert_eq!(odd.now.iter().zip(&odd.wanted).filter(|(a, b)| a != b).count(), 1);
        }
    }

    #[test]
    fn neighbours_are_one_and_a_breakpoint_keeps_its_neighbours() {
        let found = odd(|bytes| bytes[0x100..0x104].copy_from_slice(&[2, 4, 6, 8]));
        assert_eq!((found.len(), found[0].unclaimed), (1, false));
        let found = odd(|bytes| bytes[0x100..0x102].copy_from_slice(&[0xCC, 2]));
        assert_eq!((found.len(), found[0].unclaimed), (1, true));
    }

    #[test]
    fn a_damaged_copy_mends_nothing() {
        let folder = tempfile::tempdir().expect("a folder");
        let memory = Bytes(RefCell::new(vec![7; 4096]));
        let mut copy = Copy::open(folder.path(), "boot").expect("a copy");
        let range = Range { start: START, end: START + 4096, is_code: false };
        let part = Part { name: "kernel".into(), ranges: vec![range], jumps: (0, 0), calls: (0, 0) };
        copy.add(part, &memory).expect("a copy");
        let file = folder.path().join("kernel.blocks");
        let mut packed = fs::read(&file).expect("blocks");
        let last = packed.len() - 1;
        packed[last] ^= 1;
        fs::write(&file, packed).expect("blocks");
        assert!(copy.content("kernel", &copy.parts["kernel"].blocks[0]).is_err());
        // A copy of an earlier start is gone.
        assert!(Copy::open(folder.path(), "later").expect("a copy").parts.is_empty());
    }
}
