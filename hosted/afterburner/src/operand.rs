//! The operands of an instruction in a slot's record: two bytes, in the order of the assembler's
//! syntax, source first. The rewriter reads them from the text, and the verifier compares them with
//! the decoded instruction.

use iced_x86::{Instruction, OpKind, Register};

use crate::kind::Kind;

/// An operand in a byte: its type in the high half, its number in the low half.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operand(pub u8);

impl Operand {
    /// No operand, or one that the instruction implies.
    pub const NONE: Self = Self(0);
    /// Memory; the instruction in the slot has the form of the address.
    pub const MEMORY: Self = Self(0x50);
    /// An immediate number; the instruction in the slot has it.
    pub const IMMEDIATE: Self = Self(0x60);
    /// The I/O port in DX.
    pub const PORT: Self = Self(0x70);
    /// The register for port values: AL, AX or EAX.
    pub const ACCUMULATOR: Self = Self(Self::GENERAL);
    /// An operand that only the instruction in the slot shows, because a macro made it.
    pub const UNREAD: Self = Self(0xFF);

    const GENERAL: u8 = 0x10;
    const CONTROL: u8 = 0x20;
    const DEBUG: u8 = 0x30;
    const SEGMENT: u8 = 0x40;

    /// Returns the operand as text for reports.
    #[must_use]
    pub fn describe(self) -> String {
        const GENERAL: [&str; 16] = [
            "rax", "rcx", "rdx", "rbx", "rsp", "rbp", "rsi", "rdi", "r8", "r9", "r10", "r11", "r12", "r13",
            "r14", "r15",
        ];
        let number = usize::from(self.0 & 0xF);
        match self.0 & 0xF0 {
            Self::GENERAL => GENERAL[number].to_owned(),
            Self::CONTROL => format!("cr{number}"),
            Self::DEBUG => format!("dr{number}"),
            Self::SEGMENT => {
                ["es", "cs", "ss", "ds", "fs", "gs"].get(number).copied().unwrap_or("?").to_owned()
            }
            0x50 => "memory".to_owned(),
            0x60 => "number".to_owned(),
            0x70 => "dx".to_owned(),
            0 => "-".to_owned(),
            _ => "?".to_owned(),
        }
    }

    /// Returns the number of a segment register, if the operand is one.
    #[must_use]
    pub fn segment(self) -> Option<u8> {
        (self.0 & 0xF0 == Self::SEGMENT).then_some(self.0 & 0xF)
    }

    fn is(self, what: u8) -> bool {
        self != Self::UNREAD && self.0 & 0xF0 == what
    }

    /// Returns true for a control register.
    #[must_use]
    pub fn is_control(self) -> bool {
        self.is(Self::CONTROL)
    }

    /// Returns true for a debug register.
    #[must_use]
    pub fn is_debug(self) -> bool {
        self.is(Self::DEBUG)
    }

    /// Reads an operand in the assembler's syntax, in small letters.
    #[must_use]
    pub fn read(text: &str) -> Self {
        let text = text.trim();
        match text.as_bytes() {
            [] => Self::NONE,
            [b'%', ..] => Self::read_register(&text[1..]),
            [b'$', ..] => Self::IMMEDIATE,
            _ if text.contains('\\') => Self::UNREAD,
            _ if text.replace(' ', "") == "(%dx)" => Self::PORT,
            _ => Self::MEMORY,
        }
    }

    /// Reads a register, or memory with a segment before it.
    fn read_register(name: &str) -> Self {
        if name.contains(':') {
            return Self::MEMORY;
        }
        let numbered =
            |prefix: &str| name.strip_prefix(prefix)?.parse::<u8>().ok().filter(|number| *number < 16);
        if let Some(number) = numbered("cr") {
            return Self(Self::CONTROL | number);
        }
        if let Some(number) = numbered("dr").or_else(|| numbered("db")) {
            return Self(Self::DEBUG | number);
        }
        if let Some(number) = ["es", "cs", "ss", "ds", "fs", "gs"].iter().position(|known| *known == name) {
            return Self(Self::SEGMENT | number as u8);
        }
        match name {
            "dx" => Self::PORT,
            _ => general(name).map_or(Self::UNREAD, |number| Self(Self::GENERAL | number)),
        }
    }

    /// Returns the operand's meaning for a kind: DX names a port in port instructions, and is a
    /// general register elsewhere.
    #[must_use]
    pub fn meant(self, kind: Kind) -> Self {
        match (self, kind) {
            (Self::PORT, Kind::In | Kind::Out) => self,
            (Self::PORT, _) => Self(Self::GENERAL | 2),
            _ => self,
        }
    }

    /// Returns both operands of a decoded instruction, in the assembler's order.
    #[must_use]
    pub fn decoded(instruction: &Instruction) -> [Self; 2] {
        let one = |operand| match operand < instruction.op_count() {
            true => Self::decode(instruction, operand),
            false => Self::NONE,
        };
        if instruction.op_count() < 2 { [one(0), Self::NONE] } else { [one(1), one(0)] }
    }

    fn decode(instruction: &Instruction, operand: u32) -> Self {
        match instruction.op_kind(operand) {
            OpKind::Register => Self::of_register(instruction.op_register(operand)),
            OpKind::Immediate8 | OpKind::Immediate16 | OpKind::Immediate32 | OpKind::Immediate64 => {
                Self::IMMEDIATE
            }
            _ => Self::MEMORY,
        }
    }

    fn of_register(register: Register) -> Self {
        let number = (register.number() & 0xF) as u8;
        match register {
            Register::DX => Self::PORT,
            _ if register.is_cr() => Self(Self::CONTROL | number),
            _ if register.is_dr() => Self(Self::DEBUG | number),
            _ if register.is_segment_register() => Self(Self::SEGMENT | number),
            _ if register.is_gpr() => Self(Self::GENERAL | (register.full_register().number() & 0xF) as u8),
            _ => Self::UNREAD,
        }
    }
}

/// Returns the number of a general register by any of its names.
#[must_use]
pub fn general(name: &str) -> Option<u8> {
    const LETTERS: [&str; 8] = ["ax", "cx", "dx", "bx", "sp", "bp", "si", "di"];
    const LOW: [&str; 8] = ["al", "cl", "dl", "bl", "spl", "bpl", "sil", "dil"];
    const HIGH: [&str; 4] = ["ah", "ch", "dh", "bh"];
    let position =
        |names: &[&str], name: &str| names.iter().position(|known| *known == name).map(|at| at as u8);
    let wide = name.strip_prefix(['r', 'e']).unwrap_or(name);
    let numbered = || {
        let digits = name.strip_prefix('r')?;
        let digits = digits.strip_suffix(['d', 'w', 'b']).unwrap_or(digits);
        digits.parse::<u8>().ok().filter(|number| (8..16).contains(number))
    };
    position(&LETTERS, wide)
        .or_else(|| position(&LOW, name))
        .or_else(|| position(&HIGH, name))
        .or_else(numbered)
}

/// Splits operands at the commas outside of parentheses.
#[must_use]
pub fn split(text: &str) -> Vec<&str> {
    let mut depth = 0_u32;
    let mut parts = Vec::new();
    let mut start = 0;
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            b'(' => depth += 1,
            b')' => depth = depth.saturating_sub(1),
            b',' if depth == 0 => {
                parts.push(text[start..at].trim());
                start = at + 1;
            }
            _ => {}
        }
    }
    if !text.trim().is_empty() {
        parts.push(text[start..].trim());
    }
    parts
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use iced_x86::{Decoder, DecoderOptions};

    #[test]
    fn text_and_bytes_say_the_same() {
        for (text, bytes) in [
            ("%rax, %cr3", &[0x0F, 0x22, 0xD8][..]),
            ("%cr8, %r11", &[0x45, 0x0F, 0x20, 0xC3]),
            ("%rdi, %db7", &[0x0F, 0x23, 0xFF]),
            ("%eax, %gs", &[0x8E, 0xE8]),
            ("%ds, 8(%rdi)", &[0x8C, 0x5F, 0x08]),
            ("%dx, %al", &[0xEC]),
            ("(%dx), %al", &[0xEC]),
            ("%eax, $0x80", &[0xE7, 0x80]),
            ("%gs", &[0x0F, 0xA8]),
            ("(%rax), %r9", &[0x66, 0x44, 0x0F, 0x38, 0x82, 0x08]),
            ("%gs:foo(,%rax,8)", &[0x65, 0x0F, 0x01, 0x14, 0xC5, 0, 0, 0, 0]),
        ] {
            let read: Vec<Operand> = split(text).into_iter().map(Operand::read).collect();
            let read = [read[0], read.get(1).copied().unwrap_or(Operand::NONE)];
            let instruction = Decoder::with_ip(64, bytes, 0, DecoderOptions::NONE).decode();
            assert_eq!(read, Operand::decoded(&instruction), "{text}");
        }
    }

    #[test]
    fn registers_by_all_their_names() {
        for (name, number) in
            [("al", 0), ("ah", 0), ("rsp", 4), ("spl", 4), ("r8d", 8), ("r15", 15), ("edi", 7)]
        {
            assert_eq!(general(name), Some(number), "{name}");
        }
        assert_eq!((general("r16"), general("xmm0"), general("rr8")), (None, None, None));
    }
}
