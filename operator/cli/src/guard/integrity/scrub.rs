//! A pass over code and constants.

use super::{
    copy::{self, Block, Copy, Hash, hash},
    layout::{self, Files, Part},
    look::{self, Judged, Kernel, Odd, SECOND_READING, Suspect, judge},
    memory::Kcore,
    pokes::{Lock, Locks, Records},
    registers::{self, Registers},
    report::{End, Finding, State, now},
    sites::{Sites, probe_addresses},
    stores::{self, News, Stores},
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
    ops::Range,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

/// Places of a block up to which they are mended.
const MENDED_MAX: usize = 16;
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
    /// News of stores that were read, without names yet.
    unnamed: Vec<News>,
    /// Stores of which no pass has told yet.
    untold: Vec<Finding>,
    locks: Locks,
    state: State,
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
            unnamed: Vec::new(),
            untold: Vec::new(),
            locks: Locks::find(&files.symbols()?)?,
            files,
            memory,
            copy,
        };
        let _lock = scrubber.lock()?;
        scrubber.old_probes = scrubber.note_probes()?;
        if !scrubber.copy.parts.contains_key("kernel") {
            let kernel = scrubber.files.kernel()?;
            scrubber.add(kernel)?;
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
        self.sites = Some(self.running().sites().map_err(super::unreadable)?);
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
        self.read_stores()?;
        let suspects = self.suspects()?;
        (self.state.own_changes, self.state.busy) = (0, 0);
        let mut findings = Vec::new();
        if !suspects.is_empty() {
            findings.extend(self.look_closely(suspects, mends)?);
        }
        if let Some(stores) = self.stores.as_mut() {
            let mut machine = stores::Running::new(&self.files, &self.memory, &self.copy.parts);
            self.state.not_guarded = stores.follow(&mut machine, &self.copy.parts).err();
            self.state.guarded = stores.pages();
        }
        let (changed, cpus) = self.registers.compare(registers::read, || thread::sleep(SECOND_READING))?;
        findings.extend(changed);
        findings.splice(0..0, std::mem::take(&mut self.untold));
        self.state.cpus = cpus;
        self.state.passes += 1;
        self.state.last_pass = now();
        self.state.last_pass_ms = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.state.add(&findings);
        self.write_state()?;
        Ok(findings)
    }

    /// Reads the log of stores. It is read once, and a pass may fail after that.
    fn read_stores(&mut self) -> io::Result<()> {
        let Some(stores) = self.stores.as_mut() else { return Ok(()) };
        self.unnamed.extend(stores.news());
        if self.unnamed.is_empty() {
            return Ok(());
        }
        let symbols = self.files.symbols()?;
        let is_there = |part: &String| self.copy.parts.contains_key(part);
        let told = self.unnamed.drain(..).filter_map(|news| news.finding(&symbols, is_there));
        self.untold.extend(told);
        Ok(())
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

    /// Copies a part.
    fn add(&mut self, part: Part) -> io::Result<()> {
        let (memory, locks) = (&self.memory, &self.locks);
        self.copy.add(part, memory, || locks.is_free(memory, Lock::Text))
    }

    /// Copies modules that have come, and forgets those that have gone.
    fn follow_modules(&mut self) -> io::Result<()> {
        let before: BTreeSet<_> = self.copy.parts.keys().cloned().collect();
        let mut names = self.files.modules()?;
        for name in &names {
            if self.copy.parts.contains_key(name) {
                continue;
            }
            let added = self.files.module(name, &self.memory).and_then(|part| self.add(part));
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

    /// Judges suspects, and mends what is nobody's.
    fn look_closely(&mut self, suspects: Vec<Suspect>, mends: bool) -> io::Result<Vec<Finding>> {
        // Reading all symbols takes time, and places seldom change. What is odd gets a close look.
        let sites = match self.sites.take() {
            Some(sites) => sites,
            None => self.running().sites()?,
        };
        let judged: Vec<_> = suspects.iter().map(|suspect| judge(&sites, suspect)).collect();
        self.sites = Some(sites);
        let mut odd = Vec::new();
        for (suspect, judged) in suspects.into_iter().zip(judged) {
            if judged.is_well() { self.accept(&suspect, &judged) } else { odd.push(suspect) }
        }
        if odd.is_empty() {
            return Ok(Vec::new());
        }
        let mut running = self.running();
        let judged = look::look(&mut running, &mut odd)?;
        let (sites, symbols) = running.seen.take().unwrap_or_default();
        self.sites = Some(sites);
        let there = self.files.modules()?;
        let mut findings = Vec::new();
        for (suspect, judged) in odd.iter().zip(&judged) {
            if suspect.part != "kernel" && !there.contains(&suspect.part) {
                continue;
            }
            self.state.busy += judged.busy;
            // So much is no flip: the copy may be that of another place.
            let mends = mends && judged.odd.len() <= MENDED_MAX;
            for odd in &judged.odd {
                findings.extend(self.settle(suspect, odd, &symbols, mends));
            }
            if judged.busy == 0 && judged.odd.iter().all(|odd| odd.unclaimed || !mends) {
                self.accept(suspect, judged);
            }
        }
        Ok(findings)
    }

    /// Notes a block that needs no look as long as it stays as it is.
    fn accept(&mut self, suspect: &Suspect, judged: &Judged) {
        self.state.own_changes += judged.own;
        self.accepted.insert(suspect.block.start, hash(&suspect.now));
    }

    /// Returns the running kernel.
    fn running(&self) -> Running<'_> {
        Running { scrubber: self, records: None, seen: None }
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

/// The running kernel, as a scrubber sees it.
struct Running<'a> {
    scrubber: &'a Scrubber,
    records: Option<Records>,
    /// Places and symbols that were collected last.
    seen: Option<(Sites, String)>,
}

impl Kernel for Running<'_> {
    fn record(&mut self) -> io::Result<()> {
        self.records = Some(Records::begin()?);
        Ok(())
    }

    fn recorded(&mut self) -> io::Result<Option<Vec<Range<u64>>>> {
        self.records.as_ref().map_or(Ok(None), Records::places)
    }

    fn is_free(&mut self, lock: Lock) -> io::Result<bool> {
        self.scrubber.locks.is_free(&self.scrubber.memory, lock)
    }

    fn read(&mut self, block: &Block) -> io::Result<Vec<u8>> {
        copy::read(&self.scrubber.memory, block)
    }

    fn sites(&mut self) -> io::Result<Sites> {
        let Scrubber { memory, files, copy, old_probes, .. } = self.scrubber;
        let symbols = files.symbols()?;
        let parts = copy.parts.values().map(|copied| &copied.part);
        let sites = Sites::collect(memory, &symbols, &probes(), old_probes, parts)?;
        self.seen = Some((sites.clone(), symbols));
        Ok(sites)
    }

    fn pause(&mut self, time: Duration) {
        thread::sleep(time);
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
    #[test]
    fn a_kernel_that_counts_calls_is_refused() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        fs::write(file.path(), "Mitigation: Stuffing\n").expect("a file");
        assert!(refuse_counted_calls(file.path()).is_err());
        fs::write(file.path(), "Mitigation: IBRS\n").expect("a file");
        assert!(refuse_counted_calls(file.path()).is_ok());
        assert!(refuse_counted_calls(Path::new("/nonexistent")).is_ok());
    }
}
