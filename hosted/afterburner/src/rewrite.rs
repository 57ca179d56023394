//! The rewriter. It finds the sensitive instructions of a text and puts each in a slot. A rewriting
//! is a list of insertions and changes no byte of the text, so that a statement it does not
//! understand is not harmed.
//!
//! A slot is formed from the instruction on, in this order:
//!
//! 1. The slot grows over the statements that follow, up to a label, until there is room for a
//!    jump. It takes in other sensitive instructions (`pushf; pop; cli` is one slot, and so are
//!    `sti; hlt` and `swapgs; sysretq`, where nothing may come between). It takes in ordinary
//!    instructions that mean the same in another place; a call of a function is the last.
//! 2. After IRET or RET, where execution does not continue, the slot is filled up at no cost.
//! 3. Otherwise the slot grows over the statements before the instruction.
//! 4. If the slot is still too short, one NOP fills it up.
//!
//! Lengths of instructions are only estimated here, and never too long. The assembler knows them,
//! and adds the NOP of step 4 where an estimate was wrong (see [`crate::prelude`]).

use iced_x86::{Decoder, DecoderOptions};

use crate::{
    context::Context,
    kind::{JUMP, Kind},
    neighbour::Neighbour,
    operand::{self, Operand},
    record::Flags,
    statement::{Statement, statements},
};

/// A text to insert into the assembler's text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Insertion {
    /// Offset of the byte before which the text goes.
    pub at: usize,
    /// The text to insert.
    pub text: String,
}

/// The treatment of a file: see [`crate::place`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Treatment {
    /// Instructions get slots.
    Slots,
    /// Instructions are recorded, and stay as they are.
    Left,
}

/// A sensitive instruction in the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Found {
    kind: Kind,
    operands: [Operand; 2],
    /// Least length of the instruction in bytes.
    least: u8,
    /// Macro of the prelude that would catch the instruction.
    catcher: Option<&'static str>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    Sensitive(Found),
    Beside(Neighbour),
}

#[derive(Clone, Copy, Debug)]
struct Item {
    statement: Statement,
    class: Class,
    /// True in a replacement that the kernel copies.
    alternative: bool,
    /// True if the instruction stays as it is: see [`Context::is_left`].
    left: bool,
}

/// Returns the insertions that put the text's sensitive instructions into slots, in order.
#[must_use]
pub fn rewrite(text: &[u8], treatment: Treatment) -> Vec<Insertion> {
    let mut insertions = Vec::new();
    let items = classify(text, treatment, &mut insertions);
    let mut free = 0;
    let mut at = 0;
    while at < items.len() {
        if !matches!(items[at].class, Class::Sensitive(_)) {
            at += 1;
            continue;
        }
        let slot = match items[at].left {
            false => Slot::form(&items, at, free),
            true => Slot::left(&items, at, free),
        };
        slot.insert(&items, &mut insertions);
        at = slot.last + 1;
        free = at;
    }
    // Insertions at one place stay in the order of their making.
    insertions.sort_by_key(|insertion| insertion.at);
    insertions
}

/// Returns the text with its insertions.
#[must_use]
pub fn apply(text: &[u8], insertions: &[Insertion]) -> Vec<u8> {
    let added: usize = insertions.iter().map(|insertion| insertion.text.len()).sum();
    let mut out = Vec::with_capacity(text.len() + added);
    let mut done = 0;
    for Insertion { at, text: insertion } in insertions {
        out.extend_from_slice(&text[done..*at]);
        out.extend_from_slice(insertion.as_bytes());
        done = *at;
    }
    out.extend_from_slice(&text[done..]);
    out
}

/// Classifies the statements of a text, and follows the sections and the processor's mode.
fn classify(text: &[u8], treatment: Treatment, insertions: &mut Vec<Insertion>) -> Vec<Item> {
    let mut context = Context::new(treatment);
    let mut items = Vec::new();
    for statement in statements(text) {
        let words = statement.words(text);
        let (name, rest) = words.split_once(' ').unwrap_or((&words, ""));
        if words.starts_with('.') {
            let told = context.follow(name, rest);
            insertions.extend(told.map(|text| Insertion { at: statement.end, text }));
        } else if !words.is_empty() {
            let told = context.before_instruction();
            insertions.extend(told.map(|text| Insertion { at: statement.start, text }));
        }
        if !words.starts_with('.') && words.contains('"') {
            insertions.extend(in_arguments(text, &statement));
        }
        // In data a byte is a byte.
        let found = find(&words).filter(|_| context.is_code() || name != ".byte");
        items.push(Item {
            statement,
            class: found.map_or_else(|| Class::Beside(Neighbour::of(&words)), Class::Sensitive),
            alternative: context.is_replacement(),
            left: context.is_left(),
        });
    }
    insertions.extend(context.end().map(|told| Insertion { at: text.len(), text: told }));
    items
}

/// Marks a quoted macro argument that becomes a statement which the prelude would not recognize:
/// bytes, and moves.
fn in_arguments(text: &[u8], statement: &Statement) -> Vec<Insertion> {
    let mut all = Vec::new();
    let mut at = statement.start;
    while let Some(open) = text[at..statement.end].iter().position(|byte| *byte == b'"') {
        let start = at + open + 1;
        let Some(length) = text[start..statement.end].iter().position(|byte| *byte == b'"') else { break };
        for inner in statements(&text[start..start + length]) {
            let words = inner.words(&text[start..start + length]);
            if let Some(found) = find(&words).filter(|found| found.catcher.is_none()) {
                all.push(Insertion { at: start + inner.start, text: marked(&found, &words) });
            }
        }
        at = start + length + 1;
    }
    all
}

fn marked(found: &Found, words: &str) -> String {
    let (kind, least) = (found.kind as u8, found.kind.least_slot());
    match words.starts_with(".byte") {
        true => format!("mercury_bytes {kind}, {least}, "),
        false => format!("mercury_alone {kind}, {least}, 255, "),
    }
}

/// Returns the sensitive instruction of a statement, if it is one.
fn find(words: &str) -> Option<Found> {
    let mut instruction = words;
    loop {
        let (name, rest) = instruction.split_once(' ').unwrap_or((instruction, ""));
        if name == ".byte" {
            return find_in_bytes(rest);
        }
        if Neighbour::of(name) != Neighbour::Prefix || rest.is_empty() {
            return find_by_name(name, rest, name.len() == words.split(' ').next().unwrap_or("").len());
        }
        instruction = rest;
    }
}

fn find_by_name(name: &str, rest: &str, is_first: bool) -> Option<Found> {
    let operands: Vec<Operand> = operand::split(rest).into_iter().map(Operand::read).collect();
    let pair = [operands.first(), operands.get(1)].map(|one| one.copied().unwrap_or(Operand::NONE));
    let same = |kind: Kind| kind.mnemonics().iter().find(|known| **known == name).map(|known| (kind, *known));
    let named = Kind::ALL.iter().find_map(|kind| same(*kind));
    let kind = named.map(|(kind, _)| kind).or_else(|| moved(name, &pair))?;
    let least = least(kind, name, &pair);
    let catcher = named.filter(|_| is_first).map(|(_, name)| name);
    Some(Found { kind, operands: described(kind, pair), least, catcher })
}

/// Returns the kind of a move, push or pop of a special register.
fn moved(name: &str, operands: &[Operand; 2]) -> Option<Kind> {
    let [from, to] = *operands;
    match name.strip_suffix(['b', 'w', 'l', 'q']).unwrap_or(name) {
        "mov" if to.is_control() => Some(Kind::WriteControl),
        "mov" if from.is_control() => Some(Kind::ReadControl),
        "mov" if to.is_debug() => Some(Kind::WriteDebug),
        "mov" if from.is_debug() => Some(Kind::ReadDebug),
        "mov" if to.segment().is_some() => Some(Kind::LoadSegment),
        "mov" if from.segment().is_some() => Some(Kind::StoreSegment),
        "pop" if from.segment().is_some() => Some(Kind::LoadSegment),
        "push" if from.segment().is_some() => Some(Kind::StoreSegment),
        _ => None,
    }
}

/// Returns the operands to record. Operands that some texts spell and others imply are never
/// recorded. The accumulator of a port instruction that names the port alone is the exception.
fn described(kind: Kind, operands: [Operand; 2]) -> [Operand; 2] {
    use Kind::{In, Ins, Monitor, Mwait, Out, Outs, Virtualize};
    match kind {
        Ins | Outs | Monitor | Mwait | Virtualize | Kind::Invpcid | Kind::FarJump | Kind::FarCall => {
            [Operand::UNREAD; 2]
        }
        In if operands[1] == Operand::NONE => [operands[0], Operand::ACCUMULATOR],
        Out if operands[1] == Operand::NONE => [Operand::ACCUMULATOR, operands[0]],
        _ => operands.map(|operand| operand.meant(kind)),
    }
}

fn least(kind: Kind, name: &str, operands: &[Operand; 2]) -> u8 {
    use Kind::{Cli, Hlt, In, Ins, Out, Outs, Popf, Pushf, Sti};
    match kind {
        Cli | Sti | Hlt | Pushf | Popf | Ins | Outs => 1,
        In | Out if operands.contains(&Operand::PORT) || operands[0] == Operand::NONE => 1,
        Kind::FarReturn | Kind::Iret => 1,
        Kind::LoadSegment | Kind::StoreSegment if name.starts_with("pu") || name.starts_with("po") => 1,
        Kind::Swapgs | Kind::Clac | Kind::Stac => 3,
        Kind::ReadControl | Kind::WriteControl | Kind::ReadDebug | Kind::WriteDebug => 3,
        _ => 2,
    }
}

/// Finds an instruction that is given as bytes, because assemblers of its time did not know it.
fn find_in_bytes(list: &str) -> Option<Found> {
    let bytes: Option<Vec<u8>> = list.split(',').map(|byte| byte_value(byte.trim())).collect();
    let bytes = bytes?;
    let mut decoder = Decoder::with_ip(64, &bytes, 0, DecoderOptions::NONE);
    let instruction = decoder.decode();
    let kind = Kind::of(&instruction)?;
    let whole = !instruction.is_invalid() && instruction.len() == bytes.len();
    // Every one-byte instruction has had a name from the beginning, so one byte is data.
    (whole && bytes.len() > 1).then(|| Found {
        kind,
        operands: described(kind, Operand::decoded(&instruction)),
        least: bytes.len() as u8,
        catcher: None,
    })
}

fn byte_value(text: &str) -> Option<u8> {
    match text.strip_prefix("0x") {
        Some(digits) => u8::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

/// The filling of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fill {
    /// A NOP, if the slot is too short.
    Nop,
    /// Traps, if the slot is too short, after code that ends in a jump of unknown length.
    Traps,
    /// NOPs, if the slot is too short. With a right estimate there are none; the slot contains a
    /// branch.
    Late,
    /// No filling: the slot is long enough.
    Nothing,
}

/// A slot: items `first..=last` of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Slot {
    first: usize,
    last: usize,
    least: u8,
    fill: Fill,
    flags: Flags,
}

impl Slot {
    /// Returns the record of an instruction that stays as it is.
    fn left(items: &[Item], at: usize, free: usize) -> Self {
        let (first, flags) = (with_prefix(items, at, free), Flags::LEFT);
        Self { first, last: at, least: 0, fill: Fill::Nothing, flags: flags.and(flags_of(&items[at])) }
    }

    /// Forms a slot for the instruction at `at`. Items before `free` belong to another slot.
    fn form(items: &[Item], at: usize, free: usize) -> Self {
        let mut growing = Growing {
            items,
            first: with_prefix(items, at, free),
            last: at,
            bytes: 0,
            flags: flags_of(&items[at]),
            ends: None,
            relaxed: false,
        };
        growing.take(at);
        let Class::Sensitive(found) = items[at].class else { return growing.done(Fill::Nothing) };
        if growing.bytes >= found.kind.least_slot() {
            return growing.done(Fill::Nop);
        }
        growing.forward();
        match growing.ends {
            // The prelude's NOP is for lengths that are known by then.
            Some(Fill::Nop) if growing.relaxed => return growing.done(Fill::Traps),
            Some(fill) => return growing.done(fill),
            None if growing.bytes < JUMP => growing.backward(free),
            None => {}
        }
        match growing.would_break_a_shadow() {
            true => growing.done(Fill::Nothing),
            false if growing.relaxed => growing.done(Fill::Late),
            false => growing.done(Fill::Nop),
        }
    }

    fn insert(&self, items: &[Item], insertions: &mut Vec<Insertion>) {
        let mut add = |at, text: String| insertions.push(Insertion { at, text });
        add(items[self.first].statement.start, "77790: ".to_owned());
        let mut records = String::new();
        let mut number = 0;
        for index in self.first..=self.last {
            let Class::Sensitive(found) = items[index].class else { continue };
            let start = with_prefix(items, index, self.first);
            add(items[start].statement.start, format!("7777{number}: "));
            add(items[index].statement.end, format!(" ; 7778{number}:"));
            if let Some(name) = found.catcher {
                add(items[index].statement.start, format!(".purgem {name} ; "));
                add(items[index].statement.end, format!(" ; mercury_catch_{name}"));
            }
            let [source, target] = found.operands.map(|operand| operand.0);
            records += &format!(
                " ; mercury_record {number}, {}, {}, {source}, {target}",
                found.kind as u8, self.flags.0
            );
            number += 1;
        }
        let fill = match self.fill {
            Fill::Nop => format!(" ; mercury_pad {}", self.least),
            Fill::Traps => format!(" ; mercury_late {}, 0xcc", self.least),
            Fill::Late => format!(" ; mercury_late {}, 0x90", self.least),
            Fill::Nothing => String::new(),
        };
        add(items[self.last].statement.end, format!("{fill} ; 77791:{records}"));
    }
}

/// Returns the first statement of an instruction whose prefixes stand before it.
fn with_prefix(items: &[Item], at: usize, free: usize) -> usize {
    let mut first = at;
    while first > free
        && !items[first].statement.labelled
        && items[first - 1].class == Class::Beside(Neighbour::Prefix)
    {
        first -= 1;
    }
    first
}

fn flags_of(item: &Item) -> Flags {
    if item.alternative { Flags::ALTERNATIVE } else { Flags::default() }
}

#[derive(Clone, Copy)]
struct Growing<'a> {
    items: &'a [Item],
    first: usize,
    last: usize,
    bytes: u8,
    flags: Flags,
    /// Filling if execution does not continue after the slot.
    ends: Option<Fill>,
    /// True if the assembler learns the length too late for the prelude to ask for it.
    relaxed: bool,
}

impl Growing<'_> {
    /// Takes an item in. Returns true if that was possible.
    fn take(&mut self, at: usize) -> bool {
        match self.items[at].class {
            Class::Sensitive(found) => {
                self.bytes = self.bytes.saturating_add(found.least);
                self.ends = found.kind.ends_flow().then_some(Fill::Nop);
            }
            Class::Beside(Neighbour::Ordinary { least, relative, is_branch }) => {
                self.bytes = self.bytes.saturating_add(least);
                self.relaxed |= is_branch;
                self.borrow(relative);
            }
            Class::Beside(Neighbour::Calls) => {
                self.bytes = self.bytes.saturating_add(JUMP);
                self.flags = self.flags.and(Flags::CALLS);
                self.borrow(true);
            }
            Class::Beside(Neighbour::Ends { relative }) => {
                self.ends = Some(Fill::Traps);
                self.borrow(relative);
            }
            Class::Beside(_) => return false,
        }
        true
    }

    fn borrow(&mut self, relative: bool) {
        let relative = if relative { Flags::RELATIVE } else { Flags::default() };
        self.flags = self.flags.and(Flags::BORROWED).and(relative);
    }

    /// Grows over the statements that follow. A branch is taken in only if it makes the slot long
    /// enough.
    fn forward(&mut self) {
        let mut before_branch = None;
        let mut next = self.last + 1;
        while self.bytes < JUMP && self.ends.is_none() {
            let Some(item) = self.items.get(next).filter(|item| !item.statement.labelled) else { break };
            let at = match item.class {
                Class::Beside(Neighbour::Neutral) => {
                    next += 1;
                    continue;
                }
                Class::Beside(Neighbour::Prefix) => self.prefixed(next),
                _ => Some(next),
            };
            let was = *self;
            let Some(at) = at.filter(|at| self.take(*at)) else { break };
            if self.relaxed && !was.relaxed {
                before_branch = Some(was);
            }
            self.last = at;
            next = at + 1;
        }
        match before_branch {
            Some(was) if self.bytes < JUMP && self.ends.is_none() => *self = was,
            _ => {}
        }
    }

    /// Returns the sensitive instruction to which the prefixes from `at` on belong.
    fn prefixed(&self, mut at: usize) -> Option<usize> {
        while self.items.get(at)?.class == Class::Beside(Neighbour::Prefix) {
            at += 1;
        }
        let item = &self.items[at];
        (!item.statement.labelled && matches!(item.class, Class::Sensitive(_))).then_some(at)
    }

    /// Grows over the statements before, if they make the slot long enough.
    fn backward(&mut self, free: usize) {
        let (mut first, mut bytes, mut flags) = (self.first, self.bytes, self.flags.and(Flags::BORROWED));
        let mut at = self.first;
        let mut labelled = self.items[at].statement.labelled;
        while bytes < JUMP && at > free && !labelled {
            at -= 1;
            labelled = self.items[at].statement.labelled;
            match self.items[at].class {
                Class::Beside(Neighbour::Neutral) => {}
                Class::Beside(Neighbour::Ordinary { least, relative, is_branch: false }) => {
                    bytes = bytes.saturating_add(least);
                    first = at;
                    flags = if relative { flags.and(Flags::RELATIVE) } else { flags };
                }
                _ => return,
            }
            if at > free && self.items[at - 1].class == Class::Beside(Neighbour::Prefix) {
                return;
            }
        }
        if bytes >= JUMP {
            (self.first, self.bytes, self.flags) = (first, bytes, flags);
        }
    }

    /// Returns true if a NOP would stand between STI, or a load of SS, and the instruction that it
    /// protects.
    fn would_break_a_shadow(&self) -> bool {
        let shadows = matches!(self.items[self.last].class, Class::Sensitive(found) if found.kind.shadows());
        let next = self.items[self.last + 1..].iter().find(|item| {
            item.class != Class::Beside(Neighbour::Neutral) && item.statement.end > item.statement.start
        });
        let waits = next.is_some_and(|item| {
            matches!(item.class, Class::Sensitive(found)
                if matches!(found.kind, Kind::Hlt | Kind::Mwait | Kind::Sysexit | Kind::Iret))
        });
        shadows && waits && self.bytes < JUMP
    }

    fn done(&self, fill: Fill) -> Slot {
        let kinds = self.items[self.first..=self.last].iter().filter_map(|item| match item.class {
            Class::Sensitive(found) => Some(found.kind.least_slot()),
            Class::Beside(_) => None,
        });
        let least = kinds.max().unwrap_or(JUMP);
        Slot { first: self.first, last: self.last, least, fill, flags: self.flags }
    }
}
