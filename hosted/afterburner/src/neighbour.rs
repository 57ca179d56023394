//! The neighbours of a sensitive instruction, and the decision if they may share its slot.
//!
//! A slot is long enough for a jump. Most sensitive instructions are shorter, so neighbours are
//! moved together with them: a monitor copies the neighbours, and the bare machine executes them as
//! before. Sharing costs nothing, while a NOP costs an instruction each time. Only instructions
//! that mean the same in another place are borrowed. None is borrowed after a label, because code
//! may jump there.

use crate::operand;

/// A statement, classified for the slot beside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Neighbour {
    /// An instruction that can be moved.
    Ordinary {
        /// Least length of the instruction in bytes.
        least: u8,
        /// True if the instruction addresses memory relative to itself, or is a branch.
        relative: bool,
        /// True if only the assembler knows the length, short or long.
        is_branch: bool,
    },
    /// A call of a function.
    Calls,
    /// A return or a jump: execution does not continue after it.
    Ends {
        /// True for a jump, whose target is relative.
        relative: bool,
    },
    /// A directive that makes no code and does not depend on its place.
    Neutral,
    /// A prefix as a statement of its own, which belongs to the next instruction.
    Prefix,
    /// Any other statement: a slot ends before it.
    Barrier,
}

const NEUTRAL: &[&str] = &[".loc", ".file", ".line", ".ln"];
const PREFIXES: &[&str] =
    &["rep", "repe", "repz", "repne", "repnz", "lock", "data16", "addr32", "rex64", "rex.w"];
const PREFIX_BYTES: &[&str] =
    &["0xf3", "0xf2", "0x66", "0x67", "0x2e", "0x36", "0x3e", "0x26", "0x64", "0x65", "0x48"];

/// Names of functions, in small letters, whose calls the kernel patches.
const PATCHED: &[&str] = &["__fentry__", "mcount", "__sct__", "__x86_", "__cfi_", "__pfx_"];
const CONDITIONS: &[&str] = &[
    "je", "jne", "jz", "jnz", "ja", "jae", "jb", "jbe", "jc", "jnc", "jg", "jge", "jl", "jle", "jo", "jno",
    "js", "jns", "jp", "jnp",
];

/// Instructions with one byte of opcode, with or without a suffix.
const ONE_BYTE: &[&str] = &[
    "mov", "lea", "push", "pop", "test", "cmp", "add", "sub", "and", "or", "xor", "adc", "sbb", "inc", "dec",
    "neg", "not", "shl", "sal", "shr", "sar", "rol", "ror",
];
/// Instructions with two bytes of opcode, with or without a suffix.
const TWO_BYTES: &[&str] = &["bt", "bts", "btr", "btc"];
/// Instructions with a fixed name and their least length in bytes.
const FIXED: &[(&str, u8)] = &[
    ("leave", 1),
    ("cltq", 2),
    ("cqto", 2),
    ("cltd", 1),
    ("cwtl", 1),
    ("movslq", 3),
    ("movzbl", 3),
    ("movzwl", 3),
    ("movsbl", 3),
    ("movswl", 3),
    ("movzbw", 3),
    ("movsbq", 4),
    ("movswq", 4),
    ("movzbq", 4),
    ("movzwq", 4),
];

impl Neighbour {
    /// Classifies a statement (see [`crate::statement::Statement::words`]) that is not sensitive.
    #[must_use]
    pub fn of(words: &str) -> Self {
        let (name, rest) = words.split_once(' ').unwrap_or((words, ""));
        match name {
            "" => Self::Barrier,
            _ if NEUTRAL.contains(&name) || name.starts_with(".cfi_") => Self::Neutral,
            _ if is_prefix(name, rest) => Self::Prefix,
            "ret" | "retq" if rest.is_empty() => Self::Ends { relative: false },
            "jmp" if is_local(rest) || is_function(rest) => Self::Ends { relative: true },
            "call" | "callq" if is_function(rest) => Self::Calls,
            _ if CONDITIONS.contains(&name) && is_local(rest) => {
                Self::Ordinary { least: 2, relative: true, is_branch: true }
            }
            _ if rest.contains(['\\', '*', '"']) => Self::Barrier,
            _ => least(name, rest).map_or(Self::Barrier, |least| Self::Ordinary {
                least,
                relative: rest.contains("(%rip)"),
                is_branch: false,
            }),
        }
    }
}

fn is_prefix(name: &str, rest: &str) -> bool {
    (rest.is_empty() && PREFIXES.contains(&name)) || (name == ".byte" && PREFIX_BYTES.contains(&rest))
}

/// Returns true if the target is a function whose calls the kernel does not patch. It patches calls
/// for tracing, static calls, and the mitigations' thunks.
fn is_function(target: &str) -> bool {
    let symbol = |byte: u8| byte.is_ascii_alphanumeric() || b"_.".contains(&byte);
    let name = target.bytes().next().is_some_and(|byte| byte == b'_' || byte.is_ascii_alphabetic());
    name && target.bytes().all(symbol) && !PATCHED.iter().any(|prefix| target.starts_with(prefix))
}

/// Returns true for the compiler's own labels.
fn is_local(target: &str) -> bool {
    let number = target.strip_suffix(['b', 'f']).unwrap_or_default();
    target.starts_with(".l") || (!number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Returns the least length of an instruction in bytes; `None` if it is never borrowed.
fn least(name: &str, rest: &str) -> Option<u8> {
    if let Some((_, least)) = FIXED.iter().find(|(fixed, _)| *fixed == name) {
        return Some(*least);
    }
    let operands = operand::split(rest);
    let short = name.strip_suffix(['b', 'w', 'l', 'q']).unwrap_or(name);
    let known = |names: &[&'static str]| {
        let is = |wanted: &str| names.iter().copied().find(|known| *known == wanted);
        is(name).or_else(|| is(short))
    };
    let two = name.starts_with("set") || name.starts_with("cmov");
    let (base, opcode) = match (known(ONE_BYTE), known(TWO_BYTES)) {
        (Some(base), _) => (base, 1),
        (None, Some(base)) => (base, 2),
        (None, None) if two => ("set", 2),
        (None, None) => return None,
    };
    let sum = opcode + form(base, &operands) + operands.iter().map(|one| extra(base, name, one)).sum::<u8>();
    Some(sum + u8::from(is_wide(base, name, rest, &operands)))
}

/// Returns the length of the byte that names registers and memory, where no shorter form exists.
fn form(base: &str, operands: &[&str]) -> u8 {
    let register =
        |operand: Option<&&str>| operand.is_some_and(|one| one.starts_with('%') && !one.contains(':'));
    let number = operands.first().is_some_and(|one| one.starts_with('$'));
    match base {
        "push" | "pop" if number || register(operands.first()) => 0,
        _ if number && register(operands.last()) => 0,
        _ => 1,
    }
}

/// Returns the bytes that an operand adds.
fn extra(base: &str, name: &str, operand: &str) -> u8 {
    match operand.strip_prefix('$') {
        Some(value) => immediate(base, name, value),
        None if operand.starts_with('%') && !operand.contains(':') => 0,
        None => memory(operand),
    }
}

fn immediate(base: &str, name: &str, value: &str) -> u8 {
    match (base, number(value)) {
        ("mov", Some(_)) if name.ends_with('b') => 1,
        ("mov", Some(_)) if name.ends_with(['l', 'q']) => 4,
        ("shl" | "sal" | "shr" | "sar" | "rol" | "ror", Some(1)) => 0,
        ("add" | "sub" | "and" | "or" | "xor" | "cmp", Some(value))
            if name.ends_with(['l', 'q']) && i8::try_from(value).is_err() && value.abs() < 0x8000_0000 =>
        {
            4
        }
        ("test", Some(_)) if name.ends_with(['l', 'q']) => 4,
        _ => 1,
    }
}

fn memory(operand: &str) -> u8 {
    let (segment, address) = match operand.split_once(':') {
        Some((_, address)) => (1, address),
        None => (0, operand),
    };
    let (displacement, registers) = address.split_once('(').unwrap_or((address, ""));
    let form = match () {
        () if registers.starts_with("%rip") => 4,
        () if registers.is_empty() || registers.starts_with(',') => 5,
        () => {
            let indexed =
                registers.contains(',') || registers.starts_with("%rsp") || registers.starts_with("%r12");
            u8::from(indexed) + offset(displacement.trim())
        }
    };
    segment + form
}

/// Returns the length of a displacement beside a base register. A symbol may turn out to be a small
/// number.
fn offset(displacement: &str) -> u8 {
    match number(displacement) {
        _ if displacement.is_empty() => 0,
        Some(0) => 0,
        Some(value) if i8::try_from(value).is_err() => 4,
        _ => 1,
    }
}

fn number(text: &str) -> Option<i64> {
    let (sign, digits) = text.strip_prefix('-').map_or((1, text), |digits| (-1, digits));
    let value = match digits.strip_prefix("0x") {
        Some(digits) => i64::from_str_radix(digits, 16),
        None if digits.starts_with('0') && digits.len() > 1 => return None,
        None => digits.parse(),
    };
    value.ok().map(|value| sign * value)
}

/// Returns true if the instruction needs a prefix for 64 bits or for the upper registers.
fn is_wide(base: &str, name: &str, rest: &str, operands: &[&str]) -> bool {
    const UPPER: [&str; 8] = ["%r8", "%r9", "%r10", "%r11", "%r12", "%r13", "%r14", "%r15"];
    let full = |one: &&str| one.starts_with("%r") && !one.contains(':');
    let by_width =
        base != "push" && base != "pop" && (name.ends_with('q') && base != name || operands.iter().any(full));
    by_width || UPPER.iter().any(|name| rest.contains(name))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_never_too_large() {
        // The bytes that GNU as 2.40 makes of them.
        for (text, length) in [
            ("popq %rbx", 1),
            ("popq %r12", 2),
            ("push %rbp", 1),
            ("movq %rax, %rbx", 3),
            ("movl %eax, %edx", 2),
            ("movl $1, %eax", 5),
            ("movq $1, %rax", 7),
            ("movb $1, %al", 2),
            ("testb $2, %dh", 3),
            ("testb $2, %al", 2),
            ("testl $512, %eax", 5),
            ("andl $512, %ebx", 6),
            ("xorl %eax, %eax", 2),
            ("movq 8(%rsp), %rax", 5),
            ("movq (%rdi), %rax", 3),
            ("movq %gs:16, %rax", 9),
            ("leaq foo(%rip), %rdi", 7),
            ("addq $8, %rsp", 4),
            ("subq $1024, %rsp", 7),
            ("incl 4(%rdi)", 3),
            ("shrl $9, %eax", 3),
            ("shrl $1, %eax", 2),
            ("sete %al", 3),
            ("cmovne %eax, %edx", 3),
            ("btl $9, %eax", 4),
            ("leave", 1),
            ("cmpl $0, 300(%rbx)", 7),
            ("movl %r8d, %eax", 3),
            ("movzbl %al, %eax", 3),
            ("orq $512, (%rsp)", 8),
            ("push $0", 2),
            ("mov %rsp, %rdi", 3),
            ("sub $1, %eax", 3),
            ("add $128, %rax", 6),
            ("movl foo(,%rax,8), %eax", 7),
            ("notq %rax", 3),
            ("pushq 8(%rdi)", 3),
        ] {
            let Neighbour::Ordinary { least, .. } = Neighbour::of(text) else { panic!("{text}") };
            assert!(least <= length, "{text}: {least} > {length}");
            assert!(length - least <= 3, "{text}: {least} is far from {length}");
        }
    }

    #[test]
    fn an_immovable_instruction_is_a_barrier() {
        for text in [
            "call *foo",
            "call __fentry__",
            "call __sct__foo",
            "jmp __x86_return_thunk",
            "je foo",
            "call \\f",
            "jmp *%rax",
            ".long 1",
            "foo",
            "alternative \"\", \"x\", 3",
            "mov %cr3, \\reg",
            "rep movsb",
            "",
            ".pushsection .x",
            ".p2align 4",
            "syscall",
            "movq foo(%rip), \\reg",
        ] {
            assert_eq!(Neighbour::of(text), Neighbour::Barrier, "{text}");
        }
    }

    #[test]
    fn the_rest_has_its_place() {
        assert_eq!(Neighbour::of(".loc 1 2 3"), Neighbour::Neutral);
        assert_eq!(Neighbour::of(".cfi_adjust_cfa_offset 8"), Neighbour::Neutral);
        assert_eq!(Neighbour::of("rep"), Neighbour::Prefix);
        assert_eq!(Neighbour::of(".byte 0xf3"), Neighbour::Prefix);
        assert_eq!(Neighbour::of("ret"), Neighbour::Ends { relative: false });
        assert_eq!(Neighbour::of("jmp .l12"), Neighbour::Ends { relative: true });
        assert_eq!(Neighbour::of("jmp 1f"), Neighbour::Ends { relative: true });
        assert_eq!(
            Neighbour::of("incl foo(%rip)"),
            Neighbour::Ordinary { least: 6, relative: true, is_branch: false }
        );
        assert_eq!(
            Neighbour::of("je .l3"),
            Neighbour::Ordinary { least: 2, relative: true, is_branch: true }
        );
        assert_eq!(Neighbour::of("call foo"), Neighbour::Calls);
        assert_eq!(Neighbour::of("jmp foo.part.0"), Neighbour::Ends { relative: true });
    }
}
