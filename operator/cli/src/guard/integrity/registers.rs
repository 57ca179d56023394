//! Registers that protect memory and by which programs enter the kernel. Those of each CPU are compared with
//! what they were when integrity was switched on.
//!
//! A CPU is read by a thread that runs there. While KVM's guests run on an Intel processor, the MSRs of
//! SYSCALL may be a guest's. The kernel puts its own back before any program runs on.

use super::report::{End, Finding, KIND_OF_REGISTERS, now};
use mercury_abi::facts::CpuFacts;
use mercury_control::access;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
};

/// File with the registers of each CPU, in the folder of the copy.
const FILE: &str = "registers";
/// Bits of CR0 that the kernel never clears: PE, NE, WP, AM and PG.
const CR0: u64 = 1 | 1 << 5 | 1 << 16 | 1 << 18 | 1 << 31;
/// Bits of CR4 that stay as they are: PAE, UMIP, LA57, FSGSBASE, PCIDE, OSXSAVE, SMEP, SMAP and CET. Tasks
/// and KVM have others for themselves.
const CR4: u64 = 1 << 5 | 1 << 11 | 1 << 12 | 1 << 16 | 1 << 17 | 1 << 18 | 1 << 20 | 1 << 21 | 1 << 23;

/// Bits of EFER that the kernel never clears: SCE, LME, LMA and NXE. KVM and an attach have others.
const EFER: u64 = 1 | 1 << 8 | 1 << 10 | 1 << 11;

/// Registers of a CPU by their names.
type Values = BTreeMap<String, u64>;

/// Compares the registers of all CPUs.
#[derive(Debug)]
pub struct Registers {
    file: PathBuf,
    pinned: BTreeMap<u32, Values>,
    /// Changes that were reported.
    reported: BTreeSet<(u32, String, u64)>,
}

impl Registers {
    /// Opens the registers that were noted in a folder, if there are any.
    #[must_use]
    pub fn open(folder: &Path) -> Self {
        let file = folder.join(FILE);
        let pinned = fs::read(&file).ok().and_then(|text| serde_json::from_slice(&text).ok());
        Self { file, pinned: pinned.unwrap_or_default(), reported: BTreeSet::new() }
    }

    /// Compares all CPUs with what was noted, and notes those that are new. What differs has to be the same
    /// after a pause. Returns what is new, and the number of CPUs that were compared.
    ///
    /// # Errors
    ///
    /// Returns an error if the note cannot be written.
    pub fn compare(
        &mut self,
        mut read: impl FnMut() -> Vec<CpuFacts>,
        pause: impl FnOnce(),
    ) -> io::Result<(Vec<Finding>, usize)> {
        let all = read();
        self.note(&all)?;
        let first = self.differing(&all);
        self.reported.retain(|change| first.contains(change));
        if first.iter().all(|change| self.reported.contains(change)) {
            return Ok((Vec::new(), all.len()));
        }
        pause();
        let second = self.differing(&read());
        let lasting: Vec<_> = first.intersection(&second).cloned().collect();
        let new = lasting.into_iter().filter(|change| self.reported.insert(change.clone()));
        let new: Vec<_> = new.collect();
        Ok((new.iter().map(|change| self.finding(change)).collect(), all.len()))
    }

    fn note(&mut self, all: &[CpuFacts]) -> io::Result<()> {
        let known = self.pinned.len();
        for facts in all {
            self.pinned.entry(facts.cpu).or_insert_with(|| values(facts));
        }
        if self.pinned.len() == known {
            return Ok(());
        }
        let new = self.file.with_extension("new");
        fs::write(&new, serde_json::to_vec(&self.pinned)?)?;
        fs::rename(new, &self.file)
    }

    /// Returns the CPU, the name and the value of each register that differs.
    fn differing(&self, all: &[CpuFacts]) -> BTreeSet<(u32, String, u64)> {
        let of = |facts: &CpuFacts| {
            let pinned = self.pinned.get(&facts.cpu)?;
            let differs = |(name, value): &(String, u64)| pinned.get(name).is_some_and(|old| old != value);
            let cpu = facts.cpu;
            Some(values(facts).into_iter().filter(differs).map(move |(name, value)| (cpu, name, value)))
        };
        all.iter().filter_map(of).flatten().collect()
    }

    fn finding(&self, (cpu, name, value): &(u32, String, u64)) -> Finding {
        let before = self.pinned.get(cpu).and_then(|pinned| pinned.get(name)).copied().unwrap_or_default();
        Finding {
            address: format!("CPU {cpu}"),
            symbol: name.clone(),
            part: "registers".to_owned(),
            kind: KIND_OF_REGISTERS.to_owned(),
            before: format!("{before:x}"),
            found: format!("{value:x}"),
            bits: (before ^ value).count_ones(),
            end: End::NotMended,
            why: Some("registers are only reported".to_owned()),
            time: now(),
        }
    }
}

/// Returns the registers that are compared, without the bits that may change.
fn values(facts: &CpuFacts) -> Values {
    [
        ("CR0", facts.cr0 & CR0),
        ("CR4", facts.cr4 & CR4),
        ("EFER", facts.efer & EFER),
        ("STAR", facts.star),
        ("LSTAR", facts.lstar),
        ("CSTAR", facts.cstar),
        ("SFMASK", facts.sfmask),
        ("SYSENTER_CS", facts.sysenter_cs),
        ("SYSENTER_ESP", facts.sysenter_esp),
        ("SYSENTER_EIP", facts.sysenter_eip),
        ("GDTR", facts.gdtr.base_virt),
        ("GDTR.limit", facts.gdtr.limit),
        ("IDTR", facts.idtr.base_virt),
        ("IDTR.limit", facts.idtr.limit),
        ("TR", facts.tr),
    ]
    .into_iter()
    .map(|(name, value)| (name.to_owned(), value))
    .collect()
}

/// Reads the CPUs on which this thread may run. Without the driver there are none.
#[must_use]
pub fn read() -> Vec<CpuFacts> {
    let (Ok(device), Ok(all)) = (access::observe(), sched_getaffinity(None)) else { return Vec::new() };
    let read = |cpu: usize| {
        let mut one = CpuSet::new();
        one.set(cpu);
        sched_setaffinity(None, &one).ok()?;
        device.registers(u32::try_from(cpu).ok()?).ok().flatten()
    };
    let read = (0..CpuSet::MAX_CPU).filter(|cpu| all.is_set(*cpu)).filter_map(read).collect();
    let _ = sched_setaffinity(None, &all);
    read
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cpu(cpu: u32) -> CpuFacts {
        CpuFacts { cpu, cr0: CR0, cr4: CR4, efer: EFER, lstar: 0xFFFF_FFFF_8160_0000, ..CpuFacts::default() }
    }

    fn found(registers: &mut Registers, looks: &[&[CpuFacts]]) -> Vec<String> {
        let mut looks = looks.iter().map(|look| look.to_vec());
        let read = || looks.next().expect("a look");
        let (findings, _) = registers.compare(read, || ()).expect("a comparison");
        findings.iter().map(|finding| format!("{} {}", finding.address, finding.symbol)).collect()
    }

    #[test]
    fn a_register_that_has_changed_is_found_once() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut registers = Registers::open(folder.path());
        let right = vec![cpu(0), cpu(1)];
        assert!(found(&mut registers, &[&right]).is_empty());
        let smep = vec![cpu(0), CpuFacts { cr4: CR4 & !(1 << 20), ..cpu(1) }];
        // As another process compares.
        let mut registers = Registers::open(folder.path());
        assert!(found(&mut registers, &[&smep, &right]).is_empty(), "it did not last");
        assert_eq!(found(&mut registers, &[&smep, &smep]), ["CPU 1 CR4"]);
        assert!(found(&mut registers, &[&smep]).is_empty(), "it was reported");
        let both = vec![CpuFacts { lstar: 7, ..cpu(0) }, smep[1]];
        assert_eq!(found(&mut registers, &[&both, &both]), ["CPU 0 LSTAR"]);
        let no_execute = vec![CpuFacts { efer: EFER & !(1 << 11), ..cpu(0) }, smep[1]];
        assert_eq!(found(&mut registers, &[&no_execute, &no_execute]), ["CPU 0 EFER"]);
        // It happens again after it was right.
        assert!(found(&mut registers, &[&right]).is_empty());
        assert_eq!(found(&mut registers, &[&smep, &smep]), ["CPU 1 CR4"]);
    }

    #[test]
    fn a_finding_says_what_and_where() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut registers = Registers::open(folder.path());
        assert!(found(&mut registers, &[&[cpu(0)]]).is_empty());
        let wp = || vec![CpuFacts { cr0: CR0 & !(1 << 16), ..cpu(0) }];
        let (findings, cpus) = registers.compare(wp, || ()).expect("a comparison");
        assert_eq!((findings.len(), cpus, findings[0].event()), (1, 1, "register-changed"));
        let text = findings[0].text();
        assert_eq!(
            text,
            "register changed at CR0 (CPU 0): 80050021 became 80040021, 1 bit; not mended: registers are \
             only reported"
        );
    }

    /// Flags that tasks, KVM and the kernel itself change.
    #[test]
    fn what_may_change_is_left_out() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut registers = Registers::open(folder.path());
        assert!(found(&mut registers, &[&[cpu(0)]]).is_empty());
        let (ts, pce, tsd, vmxe, pge, svme) = (1 << 3, 1 << 8, 1 << 2, 1 << 13, 1 << 7, 1 << 12);
        let (cr0, cr4) = (CR0 | ts, CR4 | pce | tsd | vmxe | pge);
        let changed = CpuFacts { cr0, cr4, cr3: 7, efer: EFER | svme, ..cpu(0) };
        assert!(found(&mut registers, &[&[changed]]).is_empty());
        // A CPU that comes later is noted, and one that goes is not missed.
        assert!(found(&mut registers, &[&[cpu(1)]]).is_empty());
        assert_eq!(registers.pinned.len(), 2);
    }
}
