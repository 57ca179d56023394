//! The comparison of decoded code with the records.

use std::collections::{HashMap, HashSet};

use iced_x86::{FlowControl, Instruction, Mnemonic, OpKind};

use super::{
    Account, Finding,
    image::{Code, Image},
    is_slot,
    scan::{self, Found, scan},
};
use crate::{
    kind::Kind,
    operand::Operand,
    record::{Flags, Record},
};

/// Accounts for all code in an image.
#[must_use]
pub fn account(image: &Image, file: &str) -> Account {
    let mut books = Books::new(image, file);
    for code in &image.code {
        books.section = code.name.clone();
        scan(image, code, |found| books.enter(code, found));
    }
    books.close()
}

/// A slot, and the state of its check.
#[derive(Debug)]
struct Slot {
    start: u64,
    end: u64,
    least: u8,
    flags: Flags,
    /// Address up to which the slot consists of whole instructions.
    seen_to: u64,
    nops: u32,
    filled: u64,
    relative: bool,
    borrowed: bool,
    /// True after an instruction at which execution ends.
    ended: bool,
}

struct Books<'a> {
    image: &'a Image,
    account: Account,
    section: String,
    slots: Vec<Slot>,
    records: HashMap<u64, &'a Record>,
    met: HashSet<u64>,
}

impl<'a> Books<'a> {
    fn new(image: &'a Image, file: &str) -> Self {
        let real = image.records.iter().filter(|record| record.kind != Kind::Mode);
        Self {
            image,
            account: Account { file: file.to_owned(), ..Account::default() },
            section: String::new(),
            slots: slots(&image.records),
            records: real.map(|record| (record.instruction(), record)).collect(),
            met: HashSet::new(),
        }
    }

    fn enter(&mut self, code: &Code, found: Found<'_>) {
        match found {
            Found::Nothing(at) => self.find(at, "bytes that are no instruction"),
            Found::Instruction(instruction) => {
                let slot = self.slot_at(instruction.ip());
                if slot.is_some() || !matches!(instruction.flow_control(), FlowControl::Next) {
                    self.enter_branch(code, instruction);
                }
                let kind = Kind::of(instruction);
                if let Some(kind) = kind {
                    self.enter_sensitive(instruction, kind);
                }
                if let Some(index) = slot {
                    self.enter_slot(index, instruction, kind);
                } else if self.slot_at(instruction.next_ip() - 1).is_some() {
                    self.find(instruction.ip(), "an instruction reaches into a slot");
                }
            }
        }
    }

    fn enter_sensitive(&mut self, instruction: &Instruction, kind: Kind) {
        let address = instruction.ip();
        self.account.sensitive += 1;
        *self.account.kinds.entry(kind.name()).or_default() += 1;
        let Some(record) = self.records.get(&address).copied() else {
            self.account.uncovered += 1;
            return self.find(address, &format!("uncovered: {}", kind.name()));
        };
        self.met.insert(address);
        if record.kind != kind {
            self.find(address, &format!("{} is recorded as {}", kind.name(), record.kind.name()));
        }
        if usize::from(record.size) != instruction.len() {
            self.find(address, &format!("{}: {} bytes, not {}", kind.name(), instruction.len(), record.size));
        }
        let decoded = Operand::decoded(instruction).map(|operand| operand.meant(kind));
        let differs = |(written, real): (Operand, Operand)| written != Operand::UNREAD && written != real;
        if record.operands.into_iter().zip(decoded).any(differs) {
            let [from, to] = record.operands.map(Operand::describe);
            self.find(address, &format!("{} is recorded with {from}, {to}", kind.name()));
        }
        if record.flags.has(Flags::LEFT) {
            self.account.left += 1;
        }
    }

    /// Checks an instruction among data. Data is not decoded, because any byte may occur in it. A
    /// recorded instruction must be there. It has no slot: neither the place of its copy nor its
    /// executor is known.
    fn enter_among_data(&mut self, record: &Record) {
        let image = self.image;
        let Some(section) = image.data.iter().find(|section| section.holds(record.instruction())) else {
            return;
        };
        let Some(instruction) = scan::decode(image, section, record.instruction()) else { return };
        if let Some(kind) = Kind::of(&instruction) {
            self.enter_sensitive(&instruction, kind);
        }
        if !record.flags.has(Flags::LEFT) {
            self.find(record.slot, "a slot is not in code");
        }
    }

    fn enter_slot(&mut self, index: usize, instruction: &Instruction, kind: Option<Kind>) {
        let slot = &mut self.slots[index];
        let (start, end) = (instruction.ip(), instruction.next_ip());
        if start == slot.seen_to {
            slot.seen_to = end;
        }
        let trap = instruction.mnemonic() == Mnemonic::Int3;
        let mut wrong = None;
        if is_nop(instruction) {
            slot.nops += 1;
            slot.filled += instruction.len() as u64;
        } else if trap && slot.ended {
            slot.filled += 1;
        } else if kind.is_none() {
            slot.borrowed = true;
            slot.relative |= instruction.is_ip_rel_memory_operand() || is_near_branch(instruction);
            let last_call = slot.flags.has(Flags::CALLS) && end == slot.end;
            wrong = (!may_be_moved(instruction, last_call))
                .then_some("a slot has borrowed an instruction that cannot be moved");
        }
        slot.ended |= kind.is_some_and(Kind::ends_flow) || !falls_through(instruction);
        if end > slot.end {
            wrong = Some("an instruction reaches out of a slot");
        }
        if let Some(wrong) = wrong {
            self.find(start, wrong);
        }
    }

    fn enter_branch(&mut self, _code: &Code, instruction: &Instruction) {
        let near = matches!(
            instruction.op0_kind(),
            OpKind::NearBranch16 | OpKind::NearBranch32 | OpKind::NearBranch64
        );
        // In a module, calls of other sections are not filled in yet.
        if near && instruction.op_count() > 0 {
            self.refuse_middle(instruction.near_branch_target(), "a branch leads into the middle of a slot");
        }
    }

    fn refuse_middle(&mut self, target: u64, what: &str) {
        if self.slot_at(target).is_some_and(|index| self.slots[index].start != target) {
            self.find(target, what);
        }
    }

    fn slot_at(&self, address: u64) -> Option<usize> {
        let index = self.slots.partition_point(|slot| slot.start <= address).checked_sub(1)?;
        (address < self.slots[index].end).then_some(index)
    }

    fn close(mut self) -> Account {
        self.section.clear();
        let image = self.image;
        for record in image.records.iter().filter(|record| record.kind != Kind::Mode) {
            self.enter_among_data(record);
            if !self.met.contains(&record.instruction()) {
                self.find(
                    record.instruction(),
                    &format!("no {} is at its recorded address", record.kind.name()),
                );
            }
        }
        for symbol in &image.symbols {
            self.refuse_middle(
                symbol.address,
                &format!("the symbol {} is in the middle of a slot", symbol.name),
            );
        }
        for pointer in &image.pointers {
            // The address in a fault's entry is that of the instruction itself.
            let own = pointer.section.contains("__ex_table") && self.records.contains_key(&pointer.to);
            if !own {
                self.refuse_middle(
                    pointer.to,
                    &format!("{} points into the middle of a slot", pointer.section),
                );
            }
        }
        for index in 0..self.slots.len() {
            self.close_slot(index);
        }
        for pair in 1..self.slots.len() {
            if self.slots[pair].start < self.slots[pair - 1].end {
                self.find(self.slots[pair].start, "two slots overlap");
            }
        }
        self.account.slots = self.slots.len();
        self.account.code_bytes = image.code.iter().map(|code| code.bytes.len() as u64).sum();
        self.account
    }

    fn close_slot(&mut self, index: usize) {
        let Slot { start, end, least, flags, seen_to, nops, filled, relative, borrowed, .. } =
            self.slots[index];
        let rules = [
            (end - start < u64::from(least), "a slot is too short"),
            (seen_to != end, "a slot does not consist of whole instructions"),
            (nops > 1, "a slot has more than one NOP"),
            (relative && !flags.has(Flags::RELATIVE), "a slot depends on its place and is not flagged"),
            (borrowed && !flags.has(Flags::BORROWED), "a slot has borrowed and is not flagged"),
        ];
        for (broken, what) in rules {
            if broken {
                self.find(start, what);
            }
        }
        self.account.without_nop += usize::from(nops == 0);
        self.account.filled_bytes += filled;
    }

    fn find(&mut self, address: u64, what: &str) {
        let (function, source) = self.image.name(address);
        let code = self.image.section(address);
        let section = code.map_or_else(|| self.section.clone(), |code| code.name.clone());
        self.account.findings.push(Finding { what: what.to_owned(), address, section, function, source });
    }
}

/// Returns the slots of the records. The records of one slot must agree on it.
fn slots(records: &[Record]) -> Vec<Slot> {
    let mut all: Vec<Slot> = Vec::new();
    for record in records.iter().filter(|record| is_slot(record.kind, record.flags)) {
        let end = record.slot + u64::from(record.length);
        match all.last_mut() {
            Some(last) if (last.start, last.end) == (record.slot, end) => {
                last.least = last.least.max(record.kind.least_slot());
            }
            _ => all.push(Slot {
                start: record.slot,
                end,
                least: record.kind.least_slot(),
                flags: record.flags,
                seen_to: record.slot,
                nops: 0,
                filled: 0,
                relative: false,
                borrowed: false,
                ended: false,
            }),
        }
    }
    all
}

fn is_nop(instruction: &Instruction) -> bool {
    instruction.mnemonic() == Mnemonic::Nop
}

/// Returns true if the instruction means the same elsewhere, after an adjustment of its relative
/// address.
fn may_be_moved(instruction: &Instruction, last_call: bool) -> bool {
    match instruction.flow_control() {
        FlowControl::Next | FlowControl::Return => true,
        FlowControl::ConditionalBranch => instruction.is_jcc_short_or_near(),
        FlowControl::Call => last_call && instruction.is_call_near(),
        FlowControl::UnconditionalBranch => is_local_jump(instruction),
        _ => false,
    }
}

fn is_local_jump(instruction: &Instruction) -> bool {
    instruction.is_jmp_short_or_near()
}

fn is_near_branch(instruction: &Instruction) -> bool {
    is_local_jump(instruction) || instruction.is_jcc_short_or_near() || instruction.is_call_near()
}

fn falls_through(instruction: &Instruction) -> bool {
    !matches!(
        instruction.flow_control(),
        FlowControl::UnconditionalBranch | FlowControl::IndirectBranch | FlowControl::Return
    )
}
