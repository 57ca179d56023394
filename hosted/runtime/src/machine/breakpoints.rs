//! Breakpoints in the guest's debug registers. The host's processor has none for the guest. So the
//! monitor steps a program as long as the guest's kernel has breakpoints set, and finds by each
//! instruction's operands which breakpoints it hits.
//!
//! The steps are the monitor's own: neither the program nor the guest's kernel sees the trap flag.
//! A load of SS and the instruction after it are one step, which counts for the load only.
//!
//! Breakpoints in the kernel's code and for its accesses have no effect. Linux reports neither to a
//! debugger of programs.

use std::ops::Range;

use iced_x86::{
    Code, Decoder, DecoderOptions, Instruction, InstructionInfoFactory, MemorySize, OpAccess, Register,
    UsedMemory,
};

use super::{Exception, Machine};
use crate::{
    block::{self, Block},
    memory::Memory,
    mmu::{Access, Privilege},
    vcpu::{DEBUG_STATUS, DEBUG_STEP, RESUME, TRAP, USER_CODE_32},
};

/// DR7: the bits that enable breakpoints.
const ENABLED: u64 = 0xFF;
/// The largest number of bytes of an instruction.
const LONGEST: usize = 15;
/// The number of breakpoints.
const COUNT: usize = 4;

/// The event for which a breakpoint is set, by its bits in DR7.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    Executed,
    Written,
    /// Read or written.
    Used,
}

/// The effect of an instruction on the trap flag as the program sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Flags {
    #[default]
    Kept,
    /// They are stored on the stack.
    Stored,
    /// They are loaded, and are the program's own after the instruction.
    Loaded,
}

/// A program's instruction that runs while breakpoints are set.
#[derive(Clone, Copy, Debug, Default)]
pub struct Step {
    /// True if the trap flag was set by the monitor, not by the guest.
    is_monitors: bool,
    /// The breakpoints that the instruction hits, as bits of DR6.
    hits: u64,
    flags: Flags,
}

/// Returns the enabled breakpoints: their bits in DR6, events and bytes.
fn enabled(debug: &[u64; 8]) -> impl Iterator<Item = (u64, Event, Range<u64>)> {
    (0..COUNT).filter_map(|number| {
        let bits = debug[7] >> (16 + number * 4);
        let event = match bits & 3 {
            _ if debug[7] >> (number * 2) & 3 == 0 => return None,
            0 => Event::Executed,
            1 => Event::Written,
            3 => Event::Used,
            // Ports, which programs cannot use.
            _ => return None,
        };
        let length = [1, 2, 8, 4][(bits >> 2 & 3) as usize];
        let start = debug[number] & !(length - 1);
        Some((1 << number, event, start..start.saturating_add(length)))
    })
}

/// Returns the breakpoints that an instruction at an address hits before it runs.
fn hits_of_code(debug: &[u64; 8], rip: u64) -> u64 {
    let hit = |(_, event, bytes): &(u64, Event, Range<u64>)| *event == Event::Executed && bytes.start == rip;
    enabled(debug).filter(hit).map(|(bit, ..)| bit).sum()
}

/// Returns the breakpoints that an access hits.
fn hits_of_access(debug: &[u64; 8], address: u64, size: u64, access: OpAccess) -> u64 {
    let (reads, writes) = match access {
        OpAccess::Read | OpAccess::CondRead => (true, false),
        OpAccess::Write | OpAccess::CondWrite => (false, true),
        OpAccess::ReadWrite | OpAccess::ReadCondWrite => (true, true),
        OpAccess::None | OpAccess::NoMemAccess => (false, false),
    };
    let hit = |(_, event, bytes): &(u64, Event, Range<u64>)| {
        let counts = match event {
            Event::Executed => false,
            Event::Written => writes,
            Event::Used => reads || writes,
        };
        counts && address < bytes.end && bytes.start < address.saturating_add(size)
    };
    enabled(debug).filter(hit).map(|(bit, ..)| bit).sum()
}

/// Returns the value of a register, as it counts for an address. There is none for a vector.
fn value(block: &Block, register: Register) -> Option<u64> {
    match register {
        Register::FS => Some(block.fs.get()),
        Register::GS => Some(block.gs.get()),
        _ if register.is_segment_register() => Some(0),
        _ if !register.is_gpr() => None,
        _ => {
            let value = block.registers.general[register.full_register().number() & 15].get();
            Some(if register.size() == 8 { value } else { value & ((1 << (register.size() * 8)) - 1) })
        }
    }
}

/// Returns true if an instruction does nothing because its count of repetitions is zero.
fn is_repeated_never(block: &Block, instruction: &Instruction) -> bool {
    let is_repeated = instruction.has_rep_prefix() || instruction.has_repne_prefix();
    let count = block.registers.general[block::RCX].get();
    let is_64_bits = instruction.code_size() == iced_x86::CodeSize::Code64;
    is_repeated
        && instruction.is_string_instruction()
        && if is_64_bits { count == 0 } else { count as u32 == 0 }
}

fn size_of(memory: &UsedMemory) -> u64 {
    match memory.memory_size() {
        // The part of fixed size: old registers and the header.
        MemorySize::Xsave | MemorySize::Xsave64 => 576,
        size => (size.size() as u64).max(1),
    }
}

/// Returns the breakpoints for memory that an instruction hits.
fn hits_of_operands(debug: &[u64; 8], block: &Block, instruction: &Instruction) -> u64 {
    if is_repeated_never(block, instruction) {
        return 0;
    }
    let mut factory = InstructionInfoFactory::new();
    let used = factory.info(instruction).used_memory();
    let hits = used.iter().filter_map(|memory| {
        let address = memory.virtual_address(0, |register, _, _| value(block, register))?;
        Some(hits_of_access(debug, address, size_of(memory), memory.access()))
    });
    hits.fold(0, |all, one| all | one)
}

fn effect_on_flags(instruction: &Instruction) -> Flags {
    match instruction.code() {
        Code::Pushfw | Code::Pushfd | Code::Pushfq => Flags::Stored,
        Code::Popfw | Code::Popfd | Code::Popfq | Code::Iretw | Code::Iretd | Code::Iretq => Flags::Loaded,
        _ => Flags::Kept,
    }
}

impl Machine {
    /// Sets a debug register.
    pub(super) fn set_debug_register(&mut self, number: usize, value: u64) {
        self.vcpu.debug[number] = value;
        self.route_system_returns();
    }

    pub(super) fn has_breakpoints(&self) -> bool {
        self.vcpu.debug[7] & ENABLED != 0
    }

    /// Makes the return from a system call leave the guest if the monitor must do something before
    /// the program runs.
    pub(super) fn route_system_returns(&self) {
        let leaves = self.has_breakpoints() || self.placement.isolated().is_some();
        self.block().system_return.set(self.code.system_returns[usize::from(leaves)]);
    }

    /// Prepares the next instruction of a program while breakpoints are set: steps it, or gives the
    /// guest the trap of a breakpoint there. The program runs right after this.
    pub(crate) fn begin_step(&mut self) {
        self.end_step(false);
        if !self.has_breakpoints() || self.privilege() == Privilege::Kernel {
            return;
        }
        let registers = &self.block().registers;
        let (rip, flags) = (self.visible(registers.rip.get()), registers.rflags.get());
        registers.rip.set(rip);
        let hits = hits_of_code(&self.vcpu.debug, rip);
        if hits != 0 && flags & RESUME == 0 {
            return self.debug_exception(hits);
        }
        let mut step = Step { is_monitors: flags & TRAP == 0, ..Step::default() };
        if let Some(instruction) = self.program_instruction(rip) {
            step.hits = hits_of_operands(&self.vcpu.debug, self.block(), &instruction);
            step.flags = effect_on_flags(&instruction);
        }
        self.vcpu.step = step;
        registers.rflags.set(flags | TRAP);
        self.show_stepped_code();
    }

    /// Takes the monitor's trap flag from the guest's flags. The guest was left, by the trap of the
    /// step or otherwise.
    pub(crate) fn end_step(&mut self, is_trap: bool) -> Step {
        let step = std::mem::take(&mut self.vcpu.step);
        let flags = &self.block().registers.rflags;
        if step.is_monitors && !(is_trap && step.flags == Flags::Loaded) {
            flags.set(flags.get() & !TRAP);
        }
        step
    }

    /// Answers the trap after an instruction that was stepped.
    pub(super) fn stepped(&mut self, step: Step) {
        if step.is_monitors && step.flags == Flags::Stored {
            self.hide_stored_trap_flag();
        }
        let own = if step.is_monitors { 0 } else { DEBUG_STEP };
        if step.hits | own != 0 {
            self.debug_exception(step.hits | own);
        }
    }

    /// Gives the guest the debug exception with these bits of DR6.
    pub(super) fn debug_exception(&mut self, status: u64) {
        self.vcpu.debug[6] = DEBUG_STATUS | status;
        self.inject(Exception { vector: 1, error: None, address: None });
    }

    /// Clears the trap flag in the flags that a program has just pushed.
    fn hide_stored_trap_flag(&self) {
        let at = self.block().registers.general[block::RSP].get().wrapping_add(1);
        let mut byte = [0];
        if self.read(at, &mut byte).is_ok() {
            // The program has written there just now.
            let _ = self.write(at, &[byte[0] & !(TRAP >> 8) as u8]);
        }
    }

    /// Decodes the program's instruction at an address, if the guest has mapped all of it.
    fn program_instruction(&self, rip: u64) -> Option<Instruction> {
        let mut bytes = [0; LONGEST];
        let mut length = 0;
        while length < LONGEST {
            let at = rip.wrapping_add(length as u64);
            let some = (Memory::rest_of_page(at) as usize).min(LONGEST - length);
            let Ok(found) = self.translate(at, Access::Execute, Privilege::User) else { break };
            if self.memory.read(found.physical, &mut bytes[length..length + some]).is_none() {
                break;
            }
            length += some;
        }
        let bits = if self.block().segments.get().cs == USER_CODE_32 { 32 } else { 64 };
        let mut decoder = Decoder::with_ip(bits, &bytes[..length], rip, DecoderOptions::NONE);
        let instruction = decoder.decode();
        (!instruction.is_invalid()).then_some(instruction)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::{
        block::Segments,
        layout::DIRECT_MAP,
        machine::tests::with_machine,
        vcpu::{USER_CODE, USER_STACK},
    };

    const AT: u64 = DIRECT_MAP + 0x3000;
    const CODE: u64 = DIRECT_MAP + 0x2000;

    /// The bits of DR7 for a breakpoint.
    fn control(number: usize, event: u64, length: u64) -> u64 {
        let code = [0, 1, 0, 3, 0, 0, 0, 2][length as usize - 1];
        1 << (number * 2) | (event | code << 2) << (16 + number * 4)
    }

    /// Debug registers with breakpoints for a written byte, used 2 and 8 bytes, and code, all at one address.
    fn registers() -> [u64; 8] {
        let bits = control(0, 1, 1) | control(1, 3, 2) | control(2, 3, 8) | control(3, 0, 1);
        [AT, AT, AT + 4, AT, 0, 0, 0, bits]
    }

    fn hits(bits: u32, code: &[u8]) -> u64 {
        let instruction = Decoder::with_ip(bits, code, 0x40_0000, DecoderOptions::NONE).decode();
        hits_of_operands(&registers(), block::get(), &instruction)
    }

    #[test]
    fn accesses_hit_the_breakpoints_that_they_overlap() {
        let all = registers();
        let cases = [
            (AT, 1, OpAccess::Write, 0b111),
            (AT, 1, OpAccess::Read, 0b110),
            (AT + 1, 1, OpAccess::ReadWrite, 0b110),
            (AT + 7, 1, OpAccess::CondWrite, 0b100),
            (AT + 8, 8, OpAccess::Write, 0),
            (AT - 8, 8, OpAccess::Write, 0),
            (AT - 8, 9, OpAccess::ReadCondWrite, 0b111),
            (AT, 8, OpAccess::NoMemAccess, 0),
            (u64::MAX - 3, 8, OpAccess::Write, 0),
        ];
        for (address, size, access, expected) in cases {
            assert_eq!(
                hits_of_access(&all, address, size, access),
                expected,
                "{address:#x} {size} {access:?}"
            );
        }
        assert_eq!((hits_of_code(&all, AT), hits_of_code(&all, AT + 1)), (0b1000, 0));
        let none = [AT, AT, AT, AT, 0, 0, 0, all[7] & !ENABLED];
        assert_eq!(hits_of_access(&none, AT, 8, OpAccess::ReadWrite) | hits_of_code(&none, AT), 0);
        // The bits for all tasks enable a breakpoint as well. Ports count for nothing.
        assert_eq!(hits_of_code(&[AT, 0, 0, 0, 0, 0, 0, 2], AT), 1);
        let ports = [AT, 0, 0, 0, 0, 0, 0, control(0, 2, 1)];
        assert_eq!(hits_of_access(&ports, AT, 8, OpAccess::ReadWrite) | hits_of_code(&ports, AT), 0);
    }

    #[test]
    fn instructions_hit_by_their_operands_and_without_any() {
        with_machine(|machine| {
            let block = machine.block();
            let general = &block.registers.general;
            general[block::RAX].set(AT);
            general[block::RSP].set(AT + 8);
            general[block::RDI].set(AT);
            general[block::RSI].set(AT + 0x100);
            // mov %cl,(%rax); mov (%rax),%cl; lea (%rax),%rcx; prefetcht0 (%rax)
            assert_eq!(hits(64, &[0x88, 0x08]), 0b111);
            assert_eq!(hits(64, &[0x8A, 0x08]), 0b110);
            assert_eq!(hits(64, &[0x48, 0x8D, 0x08]), 0);
            assert_eq!(hits(64, &[0x0F, 0x18, 0x08]), 0);
            // push %rax; call; pop %rax; ret
            assert_eq!(hits(64, &[0x50]), 0b111);
            assert_eq!(hits(64, &[0xE8, 0, 0, 0, 0]), 0b111);
            general[block::RSP].set(AT);
            assert_eq!(hits(64, &[0x58]), 0b110);
            assert_eq!(hits(64, &[0xC3]), 0b110);
            // movsb; rep stosb, with a count and without
            assert_eq!(hits(64, &[0xA4]), 0b111);
            general[block::RCX].set(3);
            assert_eq!(hits(64, &[0xF3, 0xAA]), 0b111);
            general[block::RCX].set(0);
            assert_eq!(hits(64, &[0xF3, 0xAA]), 0);
            // mov %cl,%fs:(%rax)
            block.fs.set(8);
            assert_eq!(hits(64, &[0x64, 0x88, 0x08]), 0);
            general[block::RAX].set(AT - 8);
            assert_eq!(hits(64, &[0x64, 0x88, 0x08]), 0b111);
            // mov %ecx,-8(%rip), which ends at the breakpoint; mov %cl,(%eax) in code of 32 bits
            let place = (AT - 0x40_0000 - 6) as u32;
            let [a, b, c, d] = place.to_le_bytes();
            assert_eq!(hits(64, &[0x89, 0x0D, a, b, c, d]), 0b111);
            general[block::RAX].set(AT | 1 << 63);
            assert_eq!(hits(32, &[0x88, 0x08]), 0b111);
        });
    }

    #[test]
    fn a_program_does_not_see_the_monitor_s_steps() {
        with_machine(|machine| {
            let block = machine.block();
            machine.vcpu.debug = registers();
            machine.vcpu.debug[3] = 0;
            let flags = &block.registers.rflags;
            // The kernel is not stepped.
            machine.begin_step();
            assert_eq!(flags.get() & TRAP, 0);
            block.segments.set(Segments { cs: USER_CODE, ss: USER_STACK });
            let begin = |machine: &mut Machine, code: &[u8], own: u64| {
                machine.write(CODE, code).unwrap();
                block.registers.rip.set(CODE);
                flags.set(2 | own);
                machine.begin_step();
                assert_eq!(flags.get() & TRAP, TRAP);
            };
            // nop; an interruption comes before the step's trap.
            begin(machine, &[0x90], 0);
            machine.end_step(false);
            assert_eq!(flags.get() & TRAP, 0);
            // The program's own step stays.
            begin(machine, &[0x90], TRAP);
            assert!(!machine.end_step(true).is_monitors && flags.get() & TRAP != 0);
            // pushfq
            block.registers.general[block::RSP].set(AT + 0x100);
            machine.write(AT + 0x100, &0x346_u64.to_le_bytes()).unwrap();
            begin(machine, &[0x9C], 0);
            let step = machine.end_step(true);
            machine.stepped(step);
            assert_eq!((machine.read_long(AT + 0x100).unwrap(), flags.get() & TRAP), (0x246, 0));
            // popfq: a fault before it has done anything, and its loading of the flag
            begin(machine, &[0x9D], 0);
            machine.end_step(false);
            assert_eq!(flags.get() & TRAP, 0);
            begin(machine, &[0x9D], 0);
            assert!(machine.end_step(true).is_monitors && flags.get() & TRAP != 0);
            // No step without breakpoints.
            machine.vcpu.debug[7] = 0;
            flags.set(2);
            machine.begin_step();
            assert_eq!(flags.get() & TRAP, 0);
        });
    }

    #[test]
    fn returns_from_system_calls_leave_the_guest_while_there_are_breakpoints() {
        with_machine(|machine| {
            machine.code.system_returns = [1, 2];
            for (control, expected) in [(1, 2), (0, 1), (1 << 7, 2), (0x400, 1)] {
                machine.set_debug_register(7, control);
                assert_eq!(machine.block().system_return.get(), expected, "{control:#x}");
            }
        });
    }
}
