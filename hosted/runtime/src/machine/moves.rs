//! Instructions that the guest cannot execute itself: moves to programs' memory and to devices'
//! registers, and traps.

use iced_x86::{Decoder, DecoderOptions, Instruction, Mnemonic, OpKind, Register};
use mercury_afterburner::kind::Kind;

use super::{Exception, Machine, operands::Done};
use crate::{block, cpuid, layout, mmu::Privilege, smp::apic, user_access};

impl Machine {
    /// Emulates an instruction that has trapped because a process may not execute it, and that has
    /// no slot. It must be sensitive and the kernel's.
    pub fn trapped(&mut self) -> Option<()> {
        let address = self.block().registers.rip.get();
        if self.privilege() == Privilege::User || layout::is_user(address) {
            return None;
        }
        let instruction = self.instruction()?;
        Kind::of(&instruction)?;
        self.counters.trapped += 1;
        self.block().registers.rip.set(instruction.next_ip());
        if let Err(exception) = self.emulate(&instruction) {
            self.block().registers.rip.set(address);
            self.inject(exception);
        }
        Some(())
    }

    /// Returns the instruction at the guest's instruction pointer.
    fn instruction(&self) -> Option<Instruction> {
        let address = self.block().registers.rip.get();
        let replaced = self.code.accesses.instruction(address).filter(|_| !self.has_breakpoint(address));
        if replaced.is_some() {
            return replaced;
        }
        let mut bytes = [0; 15];
        let length = (1..=bytes.len())
            .rev()
            .find(|&length| self.read_code(address, &mut bytes[..length]).is_some())?;
        let code = &bytes[..length];
        Some(Decoder::with_ip(64, code, address, DecoderOptions::NONE).decode())
    }

    fn read_code(&self, address: u64, into: &mut [u8]) -> Option<()> {
        const THUNKS: std::ops::Range<u64> = layout::THUNKS..layout::THUNKS + layout::THUNKS_SIZE - 15;
        if !THUNKS.contains(&address) {
            return self.read(address, into).ok();
        }
        let from: *const u8 = std::ptr::with_exposed_provenance(address as usize);
        // SAFETY: All of the thunks' range is mapped for reading.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
        Some(())
    }

    /// Emulates consecutive moves between registers and a program's memory, for a kernel that does
    /// not have the memory mapped. Returns true if it emulated any.
    pub fn emulate_moves(&mut self) -> bool {
        const MOST: usize = 64;
        let most = if self.is_stepping() { 1 } else { MOST };
        let mut done = false;
        for _ in 0..most {
            let Some(instruction) = self.instruction() else { break };
            let is_move = self.is_simple_move(&instruction);
            let is_done = instruction.mnemonic() == Mnemonic::Nop
                || (is_move || done && self.is_simple_load(&instruction))
                    && self.emulate_move(&instruction).is_ok();
            if !is_done {
                break;
            }
            done |= is_move;
            self.block().registers.rip.set(instruction.next_ip());
        }
        // The guest may have come to an instruction that a jump has displaced.
        let registers = &self.block().registers;
        registers.rip.set(self.code.accesses.displaced(registers.rip.get()).unwrap_or(registers.rip.get()));
        done
    }

    /// Returns true for a move between a register or a number and a program's memory.
    fn is_simple_move(&self, instruction: &Instruction) -> bool {
        let is_simple = |register: Register| {
            register.is_gpr()
                && !matches!(register, Register::AH | Register::BH | Register::CH | Register::DH)
        };
        let kinds = [instruction.op0_kind(), instruction.op1_kind()];
        matches!(instruction.mnemonic(), Mnemonic::Mov | Mnemonic::Movzx)
            && kinds.contains(&OpKind::Memory)
            && (0..2).all(|at| kinds[at] != OpKind::Register || is_simple(instruction.op_register(at as u32)))
            && self.uses_program_memory(instruction)
    }

    /// Returns true for a load from the kernel's own memory, as they occur between two moves to a
    /// program's.
    fn is_simple_load(&self, instruction: &Instruction) -> bool {
        let last = self.address(instruction).saturating_add(instruction.memory_size().size() as u64);
        instruction.mnemonic() == Mnemonic::Mov
            && instruction.op0_kind() == OpKind::Register
            && instruction.op0_register().is_gpr()
            && instruction.op0_register().size() >= 4
            && instruction.op1_kind() == OpKind::Memory
            && self.memory.direct(self.address(instruction)).is_some()
            && self.memory.direct(last).is_some()
    }

    /// Returns true if all of the operand in memory may be a program's. For an instruction that
    /// copies, one of two operands is enough.
    fn uses_program_memory(&self, instruction: &Instruction) -> bool {
        let count = self.block().registers.general[block::RCX].get();
        let length = match instruction.memory_size().size() as u64 {
            _ if user_access::is_extended_state(instruction) => cpuid::size_of(self.vcpu.xcr0).into(),
            size if instruction.has_rep_prefix() => size.saturating_mul(count),
            size => size,
        };
        user_access::memory_operands(instruction)
            .any(|operand| self.are_program_addresses(self.address_of(instruction, operand), length))
    }

    /// Answers INT3 in the kernel. Returns true if it stands in place of an instruction that uses a
    /// program's memory.
    pub fn user_access_trap(&mut self) -> bool {
        let at = self.block().registers.rip.get().wrapping_sub(1);
        if self.code.accesses.at(at).is_none() {
            return false;
        }
        self.counters.trapped += 1;
        self.use_program_address(at);
        true
    }

    /// Answers an instruction that uses a program's memory. A move is emulated; other instructions
    /// are executed at the copy that the monitor keeps. If the address is not a program's, the
    /// guest gets a fault, as for an address above programs' memory.
    pub fn use_program_address(&mut self, at: u64) {
        let Some(&access) = self.code.accesses.at(at) else { return };
        self.counters.user_accesses += 1;
        self.block().registers.rip.set(at);
        if !self.uses_program_memory(&access.instruction) {
            self.counters.refused += 1;
            // After a page fault the kernel would try to repair the page, by a length of its own.
            let is_state = user_access::is_state(&access.instruction);
            self.inject(if is_state { Exception::PROTECTION } else { Exception::page(0, layout::USER_END) });
        } else if !self.emulate_moves() {
            self.block().registers.rip.set(access.code);
        }
    }

    /// Reports a fault of such a copy as a fault of the original instruction.
    pub fn return_to_replaced(&mut self) {
        let registers = &self.block().registers;
        let site =
            self.code.accesses.site(registers.rip.get()).filter(|_| self.privilege() == Privilege::Kernel);
        registers.rip.set(site.unwrap_or(registers.rip.get()));
    }

    fn emulate_move(&mut self, instruction: &Instruction) -> Done {
        if instruction.op0_kind() == OpKind::Memory {
            let value = match instruction.try_immediate(1) {
                Ok(value) => value,
                Err(_) => self.get(instruction, 1)?,
            };
            return self.set(instruction, 0, value);
        }
        let value = self.get(instruction, 1)?;
        self.set_register(instruction.op0_register(), value);
        Ok(())
    }

    /// Reads a device's register in memory. Returns nothing if there is no device.
    fn read_register(&self, physical: u64, size: usize) -> Option<u64> {
        match (self.apic(), physical.checked_sub(apic::BASE)) {
            (Some(apic), Some(offset @ 0..apic::SIZE)) => Some(apic.read(offset).into()),
            _ => self.devices.read_memory(physical, size),
        }
    }

    /// Writes a device's register in memory. Returns nothing if there is no device.
    fn write_register(&mut self, physical: u64, value: u64) -> Option<()> {
        match (&mut self.local, physical.checked_sub(apic::BASE)) {
            (Some(local), Some(offset @ 0..apic::SIZE)) => {
                local.apic.write(offset, value as u32);
                Some(())
            }
            _ => self.devices.write_memory(physical, value),
        }
    }

    /// Emulates a move to or from a device's register in memory. Returns nothing if there is no
    /// device, or if the instruction is no simple move.
    ///
    /// # Errors
    /// The exception that the guest gets.
    pub fn emulate_device_access(&mut self, physical: u64) -> Result<Option<()>, Exception> {
        let Some(instruction) = self.instruction() else { return Ok(None) };
        if !matches!(instruction.mnemonic(), Mnemonic::Mov | Mnemonic::Movzx) {
            return Ok(None);
        }
        if instruction.op0_kind() == OpKind::Memory {
            let value = match instruction.try_immediate(1) {
                Ok(value) => value,
                Err(_) => self.get(&instruction, 1)?,
            };
            if self.write_register(physical, value).is_none() {
                return Ok(None);
            }
        } else {
            let size = instruction.memory_size().size();
            let Some(value) = self.read_register(physical, size) else { return Ok(None) };
            self.set_register(instruction.op0_register(), value);
        }
        self.block().registers.rip.set(instruction.next_ip());
        self.check_devices();
        Ok(Some(()))
    }
}
