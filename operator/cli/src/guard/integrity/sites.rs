//! Places at which the kernel itself changes its code, and the forms that it gives them.
//!
//! A change is the kernel's own if it stands at a place that the kernel lists and has one of the forms that
//! the kernel writes there. Everything else is foreign.
//!
//! | place | known by | forms |
//! |---|---|---|
//! | a jump label | the table of jump labels | a NOP, or a jump to the target in the table |
//! | a static call | tables, trampolines | a call or jump to its key's function, a NOP, a return |
//! | a function's entry (ftrace) | symbols | a NOP, or a call of ftrace or of a trampoline |
//! | a kprobe | debugfs | a breakpoint, or a jump |
//! | a lock prefix | its two forms | LOCK or DS |

use super::{
    layout::{Part, relative, table},
    memory::Memory,
};
use std::{collections::BTreeMap, io};

/// Size of the longest change.
pub const SITE_MAX: usize = 6;
const NOP5: [u8; 5] = [0x0F, 0x1F, 0x44, 0x00, 0x00];
const NOP2: [u8; 2] = [0x66, 0x90];
/// A static call that is replaced by the result 0.
const ZERO: [[u8; 5]; 2] = [[0x2E, 0x2E, 0x2E, 0x31, 0xC0], [0x66, 0x66, 0x48, 0x31, 0xC0]];
const RETURN: [u8; 5] = [0xC3, 0xCC, 0xCC, 0xCC, 0xCC];
const CALL: u8 = 0xE8;
const JUMP: u8 = 0xE9;
const SHORT_JUMP: u8 = 0xEB;
const BREAKPOINT: u8 = 0xCC;
const LOCK: u8 = 0xF0;
const DS: u8 = 0x3E;
const ENDBR: u64 = 4;
/// First address of modules.
const MODULES: u64 = 0xFFFF_FFFF_A000_0000;
/// Number of flipped bits up to which bytes are taken for a damaged form of others.
const FLIPS_MAX: u32 = 2;

/// The kind of a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Jump {
        target: u64,
    },
    /// The function is the key's; 0 for none. A key that is not known may have any.
    Call {
        function: Option<u64>,
    },
    Entry,
}

/// A verdict on bytes that differ from the copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The kernel has changed them.
    Own,
    /// Nobody is known to have changed them. The byte is replaced by the one given.
    Foreign(u8),
    /// Nobody is known to have changed them, but they look like a breakpoint, a jump of a probe, or a form
    /// that stands for something else. Mending may be wrong.
    Unclaimed,
}

/// All places.
#[derive(Clone, Debug, Default)]
pub struct Sites {
    listed: BTreeMap<u64, Kind>,
    /// Addresses of functions, sorted.
    functions: Vec<u64>,
    /// Functions of the kernel that entries call.
    callers: Vec<u64>,
    /// The symbols that stand for memory of others: trampolines of ftrace and BPF, and padding of functions.
    pseudo: Vec<u64>,
    /// Addresses of kprobes: now, and when the copy was taken.
    probes: Vec<u64>,
    old_probes: Vec<u64>,
}

/// Bytes round an address: those of the copy and those of memory.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// Address of the first byte.
    pub start: u64,
    pub old: &'a [u8],
    pub now: &'a [u8],
}

impl<'a> View<'a> {
    /// Returns `size` bytes at an address, of the copy and of memory.
    fn at(&self, address: u64, size: usize) -> Option<(&'a [u8], &'a [u8])> {
        let from = usize::try_from(address.checked_sub(self.start)?).ok()?;
        let range = from..from.checked_add(size)?;
        Some((self.old.get(range.clone())?, self.now.get(range)?))
    }
}

impl Sites {
    /// Collects all places.
    ///
    /// # Errors
    ///
    /// Returns an error if a table cannot be read.
    pub fn collect<'a>(
        memory: &impl Memory,
        symbols: &str,
        probes: &str,
        old_probes: &[u64],
        parts: impl Iterator<Item = &'a Part>,
    ) -> io::Result<Self> {
        if !shows_addresses(symbols) {
            return Err(io::Error::other(
                "/proc/kallsyms shows no addresses (kernel.kptr_restrict is 2): set it to 1 or 0",
            ));
        }
        let mut sites =
            Self { probes: probe_addresses(probes), old_probes: old_probes.to_vec(), ..Self::default() };
        sites.add_symbols(symbols, memory);
        for part in parts {
            for (at, entry) in table(memory, part.jumps, 16)? {
                let target = relative(at + 4, &entry[4..]);
                sites.listed.insert(relative(at, &entry), Kind::Jump { target });
            }
            for (at, entry) in table(memory, part.calls, 8)? {
                // The lowest bits are flags.
                let key = relative(at + 4, &entry[4..]) & !3;
                sites.listed.insert(relative(at, &entry), call(memory, Some(key)));
            }
        }
        Ok(sites)
    }

    fn add_symbols(&mut self, symbols: &str, memory: &impl Memory) {
        let (mut trampolines, mut keys) = (Vec::new(), BTreeMap::new());
        for line in symbols.lines() {
            let mut words = line.split_whitespace();
            let Some(address) = words.next().and_then(|word| u64::from_str_radix(word, 16).ok()) else {
                continue;
            };
            let (Some(kind), Some(name)) = (words.next(), words.next()) else { continue };
            let module = words.next().unwrap_or_default();
            if let Some(call) = name.strip_prefix("__SCK__") {
                keys.insert((call, module), address);
            }
            if !matches!(kind, "t" | "T" | "w" | "W") {
                continue;
            }
            if let Some(call) = name.strip_prefix("__SCT__") {
                trampolines.push((address, (call, module)));
            }
            if matches!(name, "ftrace_caller" | "ftrace_regs_caller") {
                self.callers.push(address);
            }
            if module == "[bpf]" || module.starts_with("[__builtin__") || name.starts_with("__pfx_") {
                self.pseudo.push(address);
            }
            self.functions.push(address);
        }
        self.functions.sort_unstable();
        self.functions.dedup();
        self.pseudo.sort_unstable();
        for (address, name) in trampolines {
            self.listed.insert(address, call(memory, keys.get(&name).copied()));
        }
    }

    /// Judges the byte at an address, which differs.
    #[must_use]
    pub fn judge(&self, view: &View<'_>, address: u64) -> Verdict {
        let Some((&[old], &[now])) = view.at(address, 1) else {
            return Verdict::Unclaimed;
        };
        if (old, now) == (DS, LOCK) || self.is_probed(view, address) {
            return Verdict::Own;
        }
        if let Some((start, kind)) = self.site(address, view) {
            return self.judge_site(view, start, kind, address);
        }
        match now {
            BREAKPOINT => Verdict::Unclaimed,
            _ if is_in_new_jump(view, address) || is_lone_breakpoint(view, address) => Verdict::Unclaimed,
            _ if is_in_changed_branch(view, address) => Verdict::Unclaimed,
            _ => Verdict::Foreign(old),
        }
    }

    /// Returns true if a probe explains the byte.
    fn is_probed(&self, view: &View<'_>, address: u64) -> bool {
        let starts = |probes: &[u64]| {
            (0..5).map(|back| address - back).find(|start| probes.binary_search(start).is_ok())
        };
        if starts(&self.old_probes).is_some() {
            return true;
        }
        let Some(start) = starts(&self.probes) else { return false };
        let first = view.at(start, 1).map(|(_, now)| now[0]);
        match first {
            Some(JUMP) => true,
            Some(BREAKPOINT) => address == start,
            _ => false,
        }
    }

    /// Returns the place that an address belongs to.
    fn site(&self, address: u64, view: &View<'_>) -> Option<(u64, Kind)> {
        let listed = self.listed.range(address.saturating_sub(SITE_MAX as u64 - 1)..=address).next_back();
        if let Some((start, kind)) = listed
            && address < start + self.size(*start, *kind, view) as u64
        {
            return Some((*start, *kind));
        }
        let entry = (0..5).map(|back| address - back).find(|start| {
            let is_entry = |at: u64| self.functions.binary_search(&at).is_ok();
            let patched = view
                .at(*start, 5)
                .is_some_and(|(old, _)| old == NOP5 || matches!(old[0], CALL | JUMP | BREAKPOINT));
            patched && (is_entry(*start) || is_entry(start - ENDBR))
        });
        entry.map(|start| (start, Kind::Entry))
    }

    /// Returns the size of a place, by what the copy has there.
    fn size(&self, start: u64, kind: Kind, view: &View<'_>) -> usize {
        let old = view.at(start, 2).map(|(old, _)| [old[0], old[1]]);
        match (kind, old) {
            (Kind::Jump { .. }, Some(old)) if old == NOP2 || old[0] == SHORT_JUMP => 2,
            (Kind::Call { .. }, Some([0x0F, 0x80..=0x8F])) => 6,
            _ => 5,
        }
    }

    fn judge_site(&self, view: &View<'_>, start: u64, kind: Kind, address: u64) -> Verdict {
        let size = self.size(start, kind, view);
        let Some((old, now)) = view.at(start, size) else { return Verdict::Unclaimed };
        if self.is_form(start, kind, old, now) {
            return Verdict::Own;
        }
        if now[0] == BREAKPOINT {
            return Verdict::Unclaimed;
        }
        // Bytes that are nearly a legal form are a damaged one.
        let forms = self.forms(start, kind, old);
        let flips = |form: &Vec<u8>| form.iter().zip(now).map(|(a, b)| (a ^ b).count_ones()).sum::<u32>();
        let nearest = forms.iter().min_by_key(|form| flips(form)).filter(|form| flips(form) <= FLIPS_MAX);
        let at = usize::try_from(address - start).unwrap_or_default();
        match nearest {
            Some(form) if form[at] != now[at] => Verdict::Foreign(form[at]),
            // Another byte of the place is damaged.
            Some(_) => Verdict::Own,
            None => Verdict::Unclaimed,
        }
    }

    /// Returns the forms of a place that are known exactly.
    fn forms(&self, start: u64, kind: Kind, old: &[u8]) -> Vec<Vec<u8>> {
        match kind {
            Kind::Jump { target } if old.len() == 2 => {
                let distance = target.wrapping_sub(start + 2).to_le_bytes()[0];
                vec![old.to_vec(), NOP2.to_vec(), vec![SHORT_JUMP, distance]]
            }
            Kind::Jump { target } => vec![old.to_vec(), NOP5.to_vec(), branch(start, &[JUMP], target)],
            Kind::Call { function: Some(function) } if function != 0 => match old[0] {
                CALL | JUMP => vec![branch(start, &old[..1], function)],
                _ if old.len() == SITE_MAX => vec![branch(start, &old[..2], function)],
                // The key has a function, and the place does not say how it was called.
                _ => vec![branch(start, &[CALL], function), branch(start, &[JUMP], function)],
            },
            // A hook that was there may have been replaced by another one, which no symbol names.
            Kind::Entry => vec![NOP5.to_vec()],
            Kind::Call { .. } => vec![old.to_vec()],
        }
    }

    /// Returns true if the kernel writes such bytes at such a place.
    fn is_form(&self, start: u64, kind: Kind, old: &[u8], now: &[u8]) -> bool {
        match kind {
            Kind::Jump { .. } => self.forms(start, kind, old).iter().any(|form| form == now),
            Kind::Call { function } if now.len() == SITE_MAX => {
                now[..2] == old[..2] && self.is_callee(function, relative(start + 6, &now[2..]))
            }
            Kind::Call { .. } if now == RETURN || now == NOP5 || ZERO.iter().any(|zero| zero == now) => true,
            Kind::Call { function } => {
                keeps_kind(old, now) && self.is_callee(function, relative(start + 5, &now[1..]))
            }
            Kind::Entry => {
                let target = relative(start + 5, &now[1..]);
                let is_hooked = match old[0] {
                    // A hook of ftrace's own: it calls any function.
                    CALL | JUMP => keeps_kind(old, now) && self.is_function(target),
                    _ => self.is_hook(now[0], target),
                };
                now == NOP5 || is_hooked
            }
        }
    }

    /// Returns true if the entry of a function calls the address when somebody traces the function.
    fn is_hook(&self, opcode: u8, target: u64) -> bool {
        let is_trampoline = self.is_pseudo(target);
        let is_function = self.callers.contains(&target)
            || (target >= MODULES && self.functions.binary_search(&target).is_ok());
        (opcode == CALL && (is_trampoline || is_function)) || (opcode == JUMP && is_trampoline)
    }

    /// Returns true if a static call goes to the address: to its key's function. Without one it goes to a
    /// return.
    fn is_callee(&self, function: Option<u64>, target: u64) -> bool {
        match function {
            None | Some(0) => self.is_function(target),
            Some(function) => function == target,
        }
    }

    /// Returns true if an address is that of a function or of a trampoline.
    fn is_function(&self, address: u64) -> bool {
        if self.functions.binary_search(&address).is_ok() {
            return true;
        }
        self.is_pseudo(address)
    }

    /// Returns true if an address lies in a trampoline. No symbol lies between that and the address.
    fn is_pseudo(&self, address: u64) -> bool {
        let before = self.functions.partition_point(|at| *at <= address).checked_sub(1);
        before.is_some_and(|at| self.pseudo.binary_search(&self.functions[at]).is_ok())
    }
}

/// Returns true if the kernel shows the addresses of its symbols to this process.
fn shows_addresses(symbols: &str) -> bool {
    let is_shown =
        |line: &str| !line.split(' ').next().is_some_and(|at| at.bytes().all(|digit| digit == b'0'));
    symbols.lines().any(is_shown)
}

/// Returns true if the byte is in a branch that came in place of a NOP, or in one that has changed by more
/// than a flip. Such a place may be one of the kernel's that is not known.
fn is_in_changed_branch(view: &View<'_>, address: u64) -> bool {
    let is_branch = |code: u8| matches!(code, CALL | JUMP);
    let changed = |start: u64| {
        let Some((old, now)) = view.at(start, 5) else { return false };
        let flips = old.iter().zip(now).map(|(old, now)| (old ^ now).count_ones()).sum::<u32>();
        (old == NOP5 && is_branch(now[0]))
            || ((is_branch(old[0]) || old[0] == BREAKPOINT) && flips > FLIPS_MAX)
    };
    (0..5).filter_map(|back| address.checked_sub(back)).any(changed)
}

/// Returns the instruction at `start` with this opcode that goes to a target.
fn branch(start: u64, opcode: &[u8], target: u64) -> Vec<u8> {
    let distance = target.wrapping_sub(start + opcode.len() as u64 + 4);
    [opcode, &distance.to_le_bytes()[..4]].concat()
}

/// Returns the place of a static call with this key.
fn call(memory: &impl Memory, key: Option<u64>) -> Kind {
    let read = |key| {
        let mut function = [0; 8];
        memory.read(key, &mut function).ok().map(|()| u64::from_le_bytes(function))
    };
    Kind::Call { function: key.and_then(read) }
}

/// Returns true if bytes are a call where a call may be, or a jump where a jump may be.
fn keeps_kind(old: &[u8], now: &[u8]) -> bool {
    match old[0] {
        CALL => now[0] == CALL,
        JUMP => now[0] == JUMP,
        _ => matches!(now[0], CALL | JUMP),
    }
}

/// Returns true if the byte may belong to a jump that is new.
fn is_in_new_jump(view: &View<'_>, address: u64) -> bool {
    (0..5).any(|back| view.at(address - back, 1).is_some_and(|(old, now)| now[0] == JUMP && old[0] != JUMP))
}

/// Returns true if the copy has a breakpoint there that is no padding between functions: it was taken while
/// the kernel changed its code.
fn is_lone_breakpoint(view: &View<'_>, address: u64) -> bool {
    let is = |at: u64| view.at(at, 1).is_some_and(|(old, _)| old[0] == BREAKPOINT);
    is(address) && !is(address - 1) && !is(address + 1)
}

/// Parses the kernel's list of kprobes. Those that use ftrace change no other place than ftrace does.
#[must_use]
pub fn probe_addresses(text: &str) -> Vec<u64> {
    let address = |line: &str| u64::from_str_radix(line.split_whitespace().next()?, 16).ok();
    let mut all: Vec<_> = text.lines().filter_map(address).collect();
    all.sort_unstable();
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guard::integrity::layout::Range;
    use proptest::prelude::*;

    const START: u64 = 0xFFFF_FFFF_8100_0000;
    const SYMBOLS: &str = "ffffffff81000030 T ftrace_caller\n2800 d __SCK__call\n\
        ffffffff81000000 T first\nffffffff81000010 t __SCT__call\n\
        ffffffff81000020 T second\nffffffff81000030 t third\n\
        ffffffffc0000000 t ftrace_trampoline\t[__builtin__ftrace]\n\
        ffffffffc0001000 t elsewhere\t[some]\nffffffff81000038 d constant\n";
    /// Place of a jump label, of its target, and of a function that a probe is on.
    const JUMP_AT: u64 = 0x40;
    const TARGET: u64 = 0x4C;
    const PROBED: u64 = 0x50;

    /// Memory that holds the two tables.
    struct Tables(Vec<u8>);

    impl Memory for Tables {
        fn read(&self, address: u64, to: &mut [u8]) -> io::Result<()> {
            let at = usize::try_from(address).map_err(io::Error::other)?;
            to.copy_from_slice(&self.0[at..at + to.len()]);
            Ok(())
        }
    }

    /// A jump label, as the table at address 0x1000 has it. Its addresses are below 4 GiB here.
    fn sites(function: u64) -> Sites {
        let mut bytes = vec![0; 0x3000];
        let word = |value: u64, at: u64| (value.wrapping_sub(at) as u32).to_le_bytes();
        bytes[0x1000..0x1004].copy_from_slice(&word(JUMP_AT, 0x1000));
        bytes[0x2800..0x2808].copy_from_slice(&function.to_le_bytes());
        bytes[0x1004..0x1008].copy_from_slice(&word(TARGET, 0x1004));
        let part = Part {
            name: "kernel".into(),
            ranges: vec![Range { start: START, end: START + 0x100, is_code: true }],
            jumps: (0x1000, 0x1020),
            calls: (0x2000, 0x2000),
        };
        let probe = format!("{:x}  k  first+0x50\n", START + PROBED);
        let mut sites =
            Sites::collect(&Tables(bytes), SYMBOLS, &probe, &[], [&part].into_iter()).expect("sites");
        // The table's addresses, as if it lay in the kernel.
        let Some(Kind::Jump { target }) = sites.listed.remove(&JUMP_AT) else { panic!("{sites:?}") };
        sites.listed.insert(START + JUMP_AT, Kind::Jump { target: START + target });
        sites
    }

    /// A copy: each function begins with a NOP, the static call with a jump to `second`.
    fn copy() -> Vec<u8> {
        let mut old = vec![0x90; 0x100];
        for entry in [0x00, 0x20, 0x34, 0x40] {
            old[entry..entry + 5].copy_from_slice(&NOP5);
        }
        old[0x10..0x15].copy_from_slice(&[JUMP, 0x0B, 0, 0, 0]);
        old[0x50] = 0x55;
        old
    }

    /// Puts bytes at an offset, and judges each that differs.
    fn verdicts(at: usize, bytes: &[u8]) -> Vec<Verdict> {
        verdicts_with(START + 0x20, at, bytes)
    }

    /// The static call's key has this function.
    fn verdicts_with(function: u64, at: usize, bytes: &[u8]) -> Vec<Verdict> {
        let (old, mut now) = (copy(), copy());
        now[at..at + bytes.len()].copy_from_slice(bytes);
        let (sites, view) = (sites(function), View { start: START, old: &old, now: &now });
        let differ = (0..old.len()).filter(|at| old[*at] != now[*at]);
        differ.map(|at| sites.judge(&view, START + at as u64)).collect()
    }

    /// Judges each byte that differs, at a place that is not known.
    fn elsewhere(old: [u8; 5], now: [u8; 5]) -> Vec<Verdict> {
        let padded = |bytes: [u8; 5]| [&[0x90; 8][..], &bytes, &[0x90; 8]].concat();
        let (old, now) = (padded(old), padded(now));
        let view = View { start: START, old: &old, now: &now };
        let differ = (0..old.len()).filter(|at| old[*at] != now[*at]);
        differ.map(|at| Sites::default().judge(&view, START + at as u64)).collect()
    }

    /// A place of the kernel's may be unknown: a branch that came or went is never undone.
    #[test]
    fn branches_that_change_at_unknown_places_are_not_mended() {
        let is_left = |old, now| elsewhere(old, now).iter().all(|one| *one == Verdict::Unclaimed);
        let call = [CALL, 0x10, 0x20, 0, 0];
        assert!(is_left(NOP5, call) && is_left(NOP5, [JUMP, 1, 2, 3, 4]));
        assert!(is_left(call, NOP5) && is_left([JUMP, 1, 2, 3, 4], [0x55, 0x48, 0x89, 0xE5, 0x41]));
        assert!(is_left(call, [CALL, 0x1F, 0x20, 0, 0]));
        assert_eq!(elsewhere(call, [CALL, 0x11, 0x20, 0, 0]), [Verdict::Foreign(0x10)]);
        assert_eq!(elsewhere([0x55; 5], [0x55, 0x57, 0x55, 0x55, 0x55]), [Verdict::Foreign(0x55)]);
    }

    /// A hook that was there when the copy was taken may have been replaced by a near one.
    #[test]
    fn a_hook_is_not_mended_to_an_earlier_one() {
        let (mut old, mut now) = (copy(), copy());
        old[..5].copy_from_slice(&[CALL, 0, 0x10, 0, 0]);
        now[..5].copy_from_slice(&[CALL, 0, 0x30, 0, 0]);
        let view = View { start: START, old: &old, now: &now };
        assert_eq!(sites(START + 0x20).judge(&view, START + 2), Verdict::Unclaimed);
    }

    #[test]
    fn symbols_without_addresses_are_refused() {
        let hidden = "0000000000000000 T _text\n0000000000000000 t __SCT__call\n";
        let none = std::iter::empty();
        let error = Sites::collect(&Tables(Vec::new()), hidden, "", &[], none).expect_err("hidden");
        assert!(error.to_string().contains("kptr_restrict"));
    }

    fn is_own(at: usize, bytes: &[u8]) -> bool {
        let verdicts = verdicts(at, bytes);
        !verdicts.is_empty() && verdicts.iter().all(|verdict| *verdict == Verdict::Own)
    }

    /// Returns a call or a jump from an offset to an address.
    fn insn(opcode: u8, from: u64, to: u64) -> [u8; 5] {
        let [a, b, c, d, ..] = to.wrapping_sub(START + from + 5).to_le_bytes();
        [opcode, a, b, c, d]
    }

    #[test]
    fn the_kernels_own_changes() {
        // ftrace, by the function and by a trampoline; behind ENDBR too.
        assert!(is_own(0x00, &insn(CALL, 0x00, START + 0x30)));
        assert!(is_own(0x20, &insn(CALL, 0x20, 0xFFFF_FFFF_C000_0000)));
        assert!(is_own(0x34, &insn(JUMP, 0x34, 0xFFFF_FFFF_C000_0040)));
        // A static call that goes elsewhere, or nowhere.
        let elsewhere = verdicts_with(START + 0x30, 0x10, &insn(JUMP, 0x10, START + 0x30));
        assert!(!elsewhere.is_empty() && elsewhere.iter().all(|verdict| *verdict == Verdict::Own));
        assert!(is_own(0x10, &RETURN));
        assert!(is_own(0x10, &NOP5));
        // A jump label.
        assert!(is_own(0x40, &insn(JUMP, JUMP_AT, START + TARGET)));
        // A kprobe, as a breakpoint and as a jump.
        assert!(is_own(0x50, &[BREAKPOINT]));
        assert!(is_own(0x50, &insn(JUMP, PROBED, 0xFFFF_FFFF_C000_2000)));
    }

    #[test]
    fn what_the_kernel_does_not_write() {
        // No function begins there.
        assert!(!is_own(0x00, &insn(CALL, 0x00, START + 0x31)));
        assert!(!is_own(0x20, &insn(CALL, 0x20, 0xFFFF_FFFF_C000_1008)));
        // A function, but none of ftrace's, and not the key's.
        assert!(!is_own(0x00, &insn(CALL, 0x00, START + 0x20)));
        assert!(!is_own(0x10, &insn(JUMP, 0x10, START + 0x30)));
        assert!(!is_own(0x10, &insn(CALL, 0x10, START + 0x20)));
        assert!(!is_own(0x40, &insn(JUMP, JUMP_AT, START + TARGET + 1)));
        assert!(!is_own(0x40, &insn(CALL, JUMP_AT, START + TARGET)));
        assert_eq!(verdicts(0x60, &[0x91]), [Verdict::Foreign(0x90)]);
        // Perhaps a debugger's.
        assert_eq!(verdicts(0x60, &[BREAKPOINT]), [Verdict::Unclaimed]);
        assert!(
            verdicts(0x60, &insn(JUMP, 0x60, START)).iter().all(|verdict| *verdict == Verdict::Unclaimed)
        );
        // The probe does not explain its neighbour.
        assert_eq!(verdicts(0x50, &[BREAKPOINT, 0x91]), [Verdict::Own, Verdict::Foreign(0x90)]);
        // The kernel writes the breakpoint first.
        assert_eq!(verdicts(0x40, &[BREAKPOINT]), [Verdict::Unclaimed]);
    }

    #[test]
    fn a_damaged_form_becomes_the_form_that_it_was() {
        let foreign = |mut verdicts: Vec<Verdict>| {
            verdicts.retain(|verdict| *verdict != Verdict::Own);
            verdicts
        };
        let mut jump = insn(JUMP, JUMP_AT, START + TARGET);
        jump[1] ^= 0x10;
        assert_eq!(foreign(verdicts(0x40, &jump)), [Verdict::Foreign(jump[1] ^ 0x10)]);
        // The call has gone elsewhere since the copy.
        let mut call = insn(JUMP, 0x10, START + 0x40);
        call[1] ^= 0x01;
        let found = foreign(verdicts_with(START + 0x40, 0x10, &call));
        assert_eq!(found, [Verdict::Foreign(call[1] ^ 0x01)]);
    }

    proptest! {
        /// A flipped bit is never taken for the kernel's own change, and is never mended to anything but what
        /// was there.
        #[test]
        fn a_flipped_bit_is_seen(at in 0_usize..0x100, bit in 0..8) {
            let flip = 1_u8 << bit;
            let old = copy()[at];
            let probed = at == 0x50 && old ^ flip == BREAKPOINT;
            let verdicts = verdicts(at, &[old ^ flip]);
            prop_assert_eq!(verdicts.len(), 1);
            let is_seen = match verdicts[0] {
                Verdict::Foreign(wanted) => wanted == old,
                Verdict::Unclaimed => true,
                Verdict::Own => probed,
            };
            prop_assert!(is_seen, "{:?}", verdicts);
        }
    }
}
