//! Where the CPUs of the life that ended were: their tasks, and the calls on their stacks.

use super::memory::{Frames, Memory};
use mercury_abi::snapshot::EndedCpu;
use serde::Serialize;

/// Bytes of a stack that are read: the size of a task's.
const STACK: u64 = 16 << 10;
/// Calls that are shown.
const CALLS_MAX: usize = 32;
/// Distance from a symbol beyond which an address is not part of it.
const SYMBOL_MAX: u64 = 1 << 20;
/// First address of the kernel's text.
const KERNEL_TEXT: u64 = 0xFFFF_FFFF_8000_0000;
const RSP: usize = 4;
const COMM: usize = 16;

/// Names of the kernel's functions. The kernel is the same in each life.
#[derive(Debug, Default)]
pub struct Symbols(Vec<(u64, String)>);

impl Symbols {
    /// Parses `/proc/kallsyms`.
    pub fn of(text: &str) -> Self {
        let line = |line: &str| {
            let mut words = line.split_whitespace();
            let address = u64::from_str_radix(words.next()?, 16).ok().filter(|at| *at >= KERNEL_TEXT)?;
            let is_text = matches!(words.next()?, "t" | "T" | "w" | "W");
            let name = words.next().filter(|_| is_text)?;
            Some((address, words.next().map_or_else(|| name.to_owned(), |module| format!("{name} {module}"))))
        };
        let mut all: Vec<_> = text.lines().filter_map(line).collect();
        all.sort_by_key(|(address, _)| *address);
        Self(all)
    }

    /// Returns the name of the function at an address, with the offset in it.
    pub fn name(&self, address: u64) -> Option<String> {
        let after = self.0.partition_point(|(start, _)| *start <= address);
        let (start, name) = self.0.get(after.checked_sub(1)?)?;
        let offset = address - start;
        let (function, module) = name
            .split_once(' ')
            .map_or((name.as_str(), String::new()), |(name, module)| (name, format!(" {module}")));
        (offset < SYMBOL_MAX).then(|| format!("{function}+{offset:#x}{module}"))
    }
}

/// Offsets in a task, which the driver knows.
#[derive(Clone, Copy, Debug)]
pub struct Offsets {
    pub comm: u32,
    pub pid: u32,
    pub started: u32,
}

/// A CPU at the end of its life.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Cpu {
    /// Number of the CPU in Linux.
    pub cpu: u32,
    /// True if it ran a program, and not the kernel.
    pub in_user_mode: bool,
    /// Name of its task.
    pub task: String,
    /// Number of its task; 0: it was idle.
    pub pid: u32,
    /// Nanoseconds from the boot to the start of its task.
    pub started_ns: u64,
    /// Instruction pointer.
    pub rip: mercury_control::output::Hex,
    /// Function there.
    pub function: Option<String>,
    /// Calls on its stack, the innermost first. Remains of earlier calls may be among them.
    pub calls: Vec<String>,
}

impl Cpu {
    pub fn of<F: Frames>(
        memory: &Memory<'_, F>,
        symbols: &Symbols,
        offsets: Offsets,
        ended: &EndedCpu,
    ) -> Self {
        let in_user_mode = ended.cs & 3 != 0;
        let task = memory.word(ended.task_virt);
        let mut comm = [0; COMM];
        let name = task.and_then(|task| memory.read(task + u64::from(offsets.comm), &mut comm));
        let pid = task.and_then(|task| memory.half(task + u64::from(offsets.pid))).unwrap_or(0);
        let started = task.and_then(|task| memory.word(task + u64::from(offsets.started)));
        let calls = if in_user_mode { Vec::new() } else { calls(memory, symbols, ended.registers[RSP]) };
        Self {
            cpu: ended.cpu,
            in_user_mode,
            task: name.map(|()| mercury_control::status::nul_padded(&comm)).unwrap_or_default(),
            pid,
            started_ns: started.unwrap_or(0),
            rip: mercury_control::output::Hex(ended.rip),
            function: symbols.name(ended.rip).filter(|_| !in_user_mode),
            calls,
        }
    }
}

/// Returns the calls that return addresses on the stack tell of: words that point behind a call.
fn calls<F: Frames>(memory: &Memory<'_, F>, symbols: &Symbols, rsp: u64) -> Vec<String> {
    let end = (rsp | (STACK - 1)).saturating_add(1);
    let words = (rsp & !7..end).step_by(8).map_while(|at| memory.word(at));
    let calls = words.filter(|word| *word >= KERNEL_TEXT && follows_call(memory, *word));
    calls.filter_map(|address| symbols.name(address)).take(CALLS_MAX).collect()
}

/// Returns true if there is a call before this address: of an offset, or through a register or memory.
fn follows_call<F: Frames>(memory: &Memory<'_, F>, address: u64) -> bool {
    let mut before = [0; 7];
    if memory.read(address - before.len() as u64, &mut before).is_none() {
        return false;
    }
    let through = |length: usize| {
        let [.., code, operand] = before[..9 - length] else { return false };
        code == 0xFF && operand >> 3 & 7 == 2
    };
    before[2] == 0xE8 || [2, 3, 4, 6, 7].into_iter().any(through)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::postmortem::memory::tests::Model;

    const SYMBOLS: &str = "ffffffff80002000 T start\nffffffff80002100 t panic\nffffffff80002200 d data\n\
                           ffffffffc0000000 t crash [broken]\n0000000000001000 A offset\n";

    #[test]
    fn functions_have_names() {
        let symbols = Symbols::of(SYMBOLS);
        let name = |address| symbols.name(address);
        assert_eq!(name(0xFFFF_FFFF_8000_2104).as_deref(), Some("panic+0x4"));
        assert_eq!(name(0xFFFF_FFFF_8000_2210).as_deref(), Some("panic+0x110"));
        assert_eq!(name(0xFFFF_FFFF_C000_0010).as_deref(), Some("crash+0x10 [broken]"));
        assert_eq!((name(0x1000), name(0xFFFF_FFFF_8000_1000)), (None, None));
        assert_eq!(name(0xFFFF_FFFF_9000_0000), None);
    }

    #[test]
    fn a_cpu_is_described() {
        let model = Model::new(16);
        model.put(0xF000, b"NUMBER(phys_base)=0\n");
        let direct = 0xFFFF_8880_0000_0000;
        model.put_word(0xE000, direct + 0xE000);
        // A call in `panic`, and one through memory; the other words point to no call.
        model.put(0x2120, &[0xE8, 0, 0, 0, 0]);
        model.put(0x2030, &[0xFF, 0x53, 0x18]);
        let kernel = |at: u64| KERNEL_TEXT + at;
        let stack = [7, kernel(0x2125), kernel(0x2126), direct, kernel(0x2033), kernel(0x2040)];
        (0..).zip(stack).for_each(|(at, word)| model.put_word(0x4F00 + 8 * at, word));
        model.put_word(0x3000, direct + 0x6000);
        model.put(0x6010, b"python3\0");
        model.put(0x6020, &77_u32.to_le_bytes());
        model.put_word(0x6028, 12_345_678_901);
        let memory = Memory::new(&model, (0xF000, 4096), 0xE000);
        let mut ended = EndedCpu { cpu: 3, task_virt: direct + 0x3000, cs: 0x10, ..EndedCpu::default() };
        (ended.rip, ended.registers[RSP]) = (kernel(0x2100), direct + 0x4F00);
        let offsets = Offsets { comm: 0x10, pid: 0x20, started: 0x28 };
        let cpu = Cpu::of(&memory, &Symbols::of(SYMBOLS), offsets, &ended);
        assert_eq!((cpu.cpu, cpu.task.as_str(), cpu.pid, cpu.in_user_mode), (3, "python3", 77, false));
        assert_eq!(cpu.started_ns, 12_345_678_901);
        assert_eq!(cpu.function.as_deref(), Some("panic+0x0"));
        assert_eq!(cpu.calls, ["panic+0x25", "start+0x33"]);
        ended.cs = 0x33;
        let cpu = Cpu::of(&memory, &Symbols::of(SYMBOLS), offsets, &ended);
        assert!(cpu.in_user_mode && cpu.calls.is_empty() && cpu.function.is_none());
    }
}
