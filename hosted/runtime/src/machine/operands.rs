//! Operands of instructions: registers, memory and the stack.

use std::cell::Cell;

use iced_x86::{Instruction, OpKind, Register};

use super::{Exception, Machine};
use crate::{block, user_access};

/// The result of an emulated instruction, or the exception that the guest gets for it.
pub(super) type Done = Result<(), Exception>;

impl Machine {
    pub(super) fn general(&self, register: Register) -> &'static Cell<u64> {
        &self.block().registers.general[register.full_register().number() & 15]
    }

    pub(super) fn push(&mut self, value: u64) -> Done {
        let top = self.block().registers.general[block::RSP].get() - 8;
        self.write(top, &value.to_le_bytes())?;
        self.block().registers.general[block::RSP].set(top);
        Ok(())
    }

    pub(super) fn pop(&mut self) -> Result<u64, Exception> {
        let top = self.block().registers.general[block::RSP].get();
        let value = self.read_long(top)?;
        self.block().registers.general[block::RSP].set(top + 8);
        Ok(value)
    }

    /// Returns the address of an instruction's operand in memory.
    pub(super) fn address(&self, instruction: &Instruction) -> u64 {
        self.address_of(instruction, user_access::memory_operands(instruction).next().unwrap_or(0))
    }

    pub(super) fn address_of(&self, instruction: &Instruction, operand: u32) -> u64 {
        let registers = &self.block().registers.general;
        let value = |register: Register, _: usize, _: usize| {
            Some(match register {
                Register::GS => self.block().gs.get(),
                Register::FS => self.block().fs.get(),
                _ if register.is_segment_register() => 0,
                _ => {
                    let value = registers[register.full_register().number() & 15].get();
                    if register.size() == 4 { value & 0xFFFF_FFFF } else { value }
                }
            })
        };
        instruction.virtual_address(operand, 0, value).unwrap_or(0)
    }

    /// Reads an operand in the instruction's own size.
    pub(super) fn get(&mut self, instruction: &Instruction, operand: u32) -> Result<u64, Exception> {
        if instruction.op_kind(operand) == OpKind::Register {
            let register = instruction.op_register(operand);
            let value = self.general(register).get();
            return Ok(match register.size() {
                2 => value & 0xFFFF,
                4 => value & 0xFFFF_FFFF,
                _ => value,
            });
        }
        let mut bytes = [0; 8];
        let size = instruction.memory_size().size().min(8);
        self.read(self.address(instruction), &mut bytes[..size])?;
        Ok(u64::from_le_bytes(bytes))
    }

    pub(super) fn set(&mut self, instruction: &Instruction, operand: u32, value: u64) -> Done {
        if instruction.op_kind(operand) == OpKind::Register {
            self.set_register(instruction.op_register(operand), value);
            return Ok(());
        }
        let size = instruction.memory_size().size().min(8);
        self.write(self.address(instruction), &value.to_le_bytes()[..size])
    }

    pub(super) fn set_register(&mut self, register: Register, value: u64) {
        let old = self.general(register).get();
        self.general(register).set(match register.size() {
            1 => old & !0xFF | value & 0xFF,
            2 => old & !0xFFFF | value & 0xFFFF,
            4 => value & 0xFFFF_FFFF,
            _ => value,
        });
    }

    pub(super) fn pair(&self) -> u64 {
        let general = &self.block().registers.general;
        general[block::RDX].get() << 32 | general[block::RAX].get() & 0xFFFF_FFFF
    }

    pub(super) fn set_pair(&mut self, value: u64) {
        let general = &self.block().registers.general;
        general[block::RAX].set(value & 0xFFFF_FFFF);
        general[block::RDX].set(value >> 32);
    }
}
