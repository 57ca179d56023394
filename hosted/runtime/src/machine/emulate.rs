//! Emulation of sensitive instructions.

use std::arch::x86_64::_rdtsc;

use iced_x86::{Instruction, OpKind, Register};
use mercury_afterburner::kind::Kind;

use super::operands::Done;
use crate::{
    block::{self, IF, Segments},
    cpuid,
    fork::Work,
    machine::{End, Exception, Machine},
    process::per_space::Request,
    selectors,
    smp::{self, Processor, apic::Apic},
    vcpu::{CR4_GLOBAL, Table, USER_CODE, USER_CODE_32, USER_STACK},
};

/// The model-specific register with the address of the local interrupt controller.
const CONTROLLER_BASE: u32 = 0x1B;
/// The model-specific register with the deadline of the controller's timer.
const DEADLINE: u32 = 0x6E0;
/// Registers that the processor and the block have: the time stamp counter, EFER, the selectors and
/// address of system calls, the bases of FS and GS.
const KNOWN_REGISTERS: [u32; 8] =
    [0x10, 0xC000_0080, 0xC000_0081, 0xC000_0082, 0xC000_0084, 0xC000_0100, 0xC000_0101, 0xC000_0102];
/// The bit of CR3 that keeps translations.
const NO_FLUSH: u64 = 1 << 63;

/// Refuses a return to a program where the processor would: with selectors of no program's code or
/// stack, or outside all addresses.
fn check_return(rip: u64, segments: Segments) -> Done {
    const HIGHEST: u64 = (1 << 17) - 1;
    let wrong = |selector: u16| Exception { error: Some(u32::from(selector & !3)), ..Exception::PROTECTION };
    let is_an_address = match segments.cs {
        cs if cs & 3 == 0 => return Ok(()),
        USER_CODE => matches!(rip >> 47, 0 | HIGHEST),
        USER_CODE_32 => rip >> 32 == 0,
        other => return Err(wrong(other)),
    };
    match (segments.ss, is_an_address) {
        (USER_STACK, true) => Ok(()),
        (USER_STACK, false) => Err(Exception::PROTECTION),
        (other, _) => Err(wrong(other)),
    }
}

impl Machine {
    /// Emulates an instruction. The guest's instruction pointer already points after it.
    ///
    /// # Errors
    /// The exception that the guest gets for it.
    pub fn emulate(&mut self, instruction: &Instruction) -> Done {
        if self.is_for_the_first(instruction) && self.ask_first_process(Request::Emulate(*instruction)) {
            return Ok(());
        }
        match Kind::of(instruction).ok_or(Exception::UNDEFINED)? {
            Kind::Cli => self.block().flags.set(self.block().flags.get() & !IF),
            Kind::Sti => self.block().flags.set(self.block().flags.get() | IF),
            Kind::Hlt | Kind::Mwait => self.halt(),
            Kind::Pushf => {
                let flags = self.flags();
                return self.push(flags);
            }
            Kind::Popf => {
                let flags = self.pop()?;
                self.set_flags(flags);
            }
            Kind::Iret => return self.interrupt_return(),
            Kind::FarReturn => {
                let (rip, cs) = (self.pop()?, self.pop()?);
                self.block().registers.rip.set(rip);
                self.block().set_code_segment(cs as u16);
            }
            Kind::Lgdt => self.vcpu.gdt = self.table(instruction)?,
            Kind::Lidt => self.vcpu.idt = self.table(instruction)?,
            Kind::Sgdt => return self.store_table(instruction, self.vcpu.gdt),
            Kind::Sidt => return self.store_table(instruction, self.vcpu.idt),
            Kind::Lldt => self.vcpu.ldt = self.get(instruction, 0)? as u16,
            Kind::Sldt => return self.set(instruction, 0, u64::from(self.vcpu.ldt)),
            Kind::Ltr => return self.load_task(instruction),
            Kind::Str => return self.set(instruction, 0, u64::from(self.vcpu.task)),
            Kind::Smsw => return self.set(instruction, 0, self.vcpu.cr0),
            Kind::Lmsw => self.vcpu.cr0 = self.vcpu.cr0 & !0xF | self.get(instruction, 0)? & 0xF,
            Kind::Clts => self.vcpu.cr0 &= !8,
            Kind::Invd | Kind::Wbinvd | Kind::Monitor | Kind::Clac | Kind::Stac | Kind::Verify => {}
            Kind::Invlpg => {
                let address = self.address(instruction);
                self.drop_page(address);
            }
            Kind::Invpcid => self.flush_all(),
            Kind::Rdmsr => self.read_msr(),
            Kind::Wrmsr => self.write_msr(),
            Kind::Rdpmc => self.set_pair(0),
            Kind::Swapgs => self.block().gs.swap(&self.block().gs_other),
            Kind::Cpuid => self.cpuid(),
            Kind::Xsetbv => return self.set_extended(),
            Kind::Xgetbv => self.set_pair(self.vcpu.xcr0),
            Kind::Lar | Kind::Lsl => return self.load_limit_or_rights(instruction),
            Kind::ReadControl => return self.read_control(instruction),
            Kind::WriteControl => return self.write_control(instruction),
            Kind::ReadDebug => {
                let value = self.vcpu.debug[instruction.op1_register().number() & 7];
                return self.set(instruction, 0, value);
            }
            Kind::WriteDebug => {
                let value = self.get(instruction, 1)?;
                self.set_debug_register(instruction.op0_register().number() & 7, value);
            }
            Kind::LoadSegment => return self.load_segment(instruction),
            Kind::StoreSegment => return self.store_segment(instruction),
            Kind::In => return self.port_in(instruction),
            Kind::Out => return self.port_out(instruction),
            Kind::Ins | Kind::Outs => {
                self.end(End::Broken, "the guest uses string instructions for ports");
            }
            Kind::Sysret => self.system_return(),
            _ => return Err(Exception::UNDEFINED),
        }
        Ok(())
    }

    /// Returns true if an instruction needs devices, which only the first of several address-space
    /// processes has.
    fn is_for_the_first(&self, instruction: &Instruction) -> bool {
        match Kind::of(instruction) {
            Some(Kind::Hlt | Kind::Mwait | Kind::In | Kind::Out | Kind::Ins | Kind::Outs) => true,
            Some(Kind::Rdmsr | Kind::Wrmsr) => {
                !KNOWN_REGISTERS.contains(&(self.block().registers.general[block::RCX].get() as u32))
            }
            _ => false,
        }
    }

    fn table(&mut self, instruction: &Instruction) -> Result<Table, Exception> {
        let mut bytes = [0; 10];
        self.read(self.address(instruction), &mut bytes)?;
        let [low, high, base @ ..] = bytes;
        Ok(Table { base: u64::from_le_bytes(base), limit: u16::from_le_bytes([low, high]) })
    }

    fn store_table(&mut self, instruction: &Instruction, table: Table) -> Done {
        let bytes = [&table.limit.to_le_bytes()[..], &table.base.to_le_bytes()].concat();
        self.write(self.address(instruction), &bytes)
    }

    /// Reads both halves of a descriptor.
    fn descriptor(&self, selector: u16) -> Result<[u64; 2], Exception> {
        let at = u64::from(selector & !7);
        if selector & 4 != 0 || at == 0 || at + 7 > u64::from(self.vcpu.gdt.limit) {
            return Err(Exception::PROTECTION);
        }
        let low = self.read_long(self.vcpu.gdt.base + at)?;
        Ok([low, self.read_long(self.vcpu.gdt.base + at + 8).unwrap_or(0)])
    }

    fn load_task(&mut self, instruction: &Instruction) -> Done {
        let selector = self.get(instruction, 0)? as u16;
        let [low, high] = self.descriptor(selector)?;
        self.vcpu.task = selector;
        self.vcpu.task_base = low >> 16 & 0xFF_FFFF | low >> 32 & 0xFF00_0000 | high << 32;
        Ok(())
    }

    /// Emulates LSL and LAR: loads a limit or rights, and says in the zero flag if there is such a
    /// descriptor.
    fn load_limit_or_rights(&mut self, instruction: &Instruction) -> Done {
        const ZERO: u64 = 1 << 6;
        let selector = self.get(instruction, 1)? as u16;
        let found = self.descriptor(selector);
        let flags = &self.block().registers.rflags;
        let Ok([low, _]) = found else {
            flags.set(flags.get() & !ZERO);
            return Ok(());
        };
        flags.set(flags.get() | ZERO);
        let limit = low & 0xFFFF | low >> 32 & 0xF_0000;
        let limit = if low >> 55 & 1 == 1 { limit << 12 | 0xFFF } else { limit };
        let rights = low >> 32 & 0x00FF_FF00;
        let value = if Kind::of(instruction) == Some(Kind::Lsl) { limit } else { rights };
        self.set(instruction, 0, value)
    }

    fn load_segment(&mut self, instruction: &Instruction) -> Done {
        let register = instruction.op0_register();
        let selector = match instruction.op_count() {
            1 => self.pop()? as u16,
            _ => self.get(instruction, 1)? as u16,
        };
        let base = match selector & !3 {
            0 => 0,
            _ => {
                let [low, _] = self.descriptor(selector)?;
                low >> 16 & 0xFF_FFFF | low >> 32 & 0xFF00_0000
            }
        };
        selectors::set(register, selector);
        match register {
            Register::SS => self.block().set_stack_segment(selector),
            Register::FS => self.block().fs.set(base),
            Register::GS => self.block().gs.set(base),
            _ => {}
        }
        Ok(())
    }

    fn store_segment(&mut self, instruction: &Instruction) -> Done {
        let is_push = instruction.op_count() == 1;
        let register = if is_push { instruction.op0_register() } else { instruction.op1_register() };
        let place = selectors::REGISTERS.iter().position(|one| *one == register);
        let value = u64::from(match (place, register) {
            (Some(place), _) => selectors::read()[place],
            (None, Register::CS) => self.block().segments.get().cs,
            (None, _) => self.block().segments.get().ss,
        });
        if is_push { self.push(value) } else { self.set(instruction, 0, value) }
    }

    fn interrupt_return(&mut self) -> Done {
        let mut frame = [0; 40];
        self.read(self.block().registers.general[block::RSP].get(), &mut frame)?;
        let (words, _) = frame.as_chunks::<8>();
        let [rip, cs, flags, rsp, ss] = [0, 1, 2, 3, 4].map(|at| u64::from_le_bytes(words[at]));
        let segments = Segments { cs: cs as u16, ss: ss as u16 };
        check_return(rip, segments)?;
        let registers = &self.block().registers;
        registers.rip.set(rip);
        registers.general[block::RSP].set(rsp);
        self.block().segments.set(segments);
        self.set_flags(flags);
        self.map_what_faulted();
        self.show_stepped_code();
        Ok(())
    }

    /// Emulates SYSRET.
    pub fn system_return(&mut self) {
        let general = &self.block().registers.general;
        self.block().registers.rip.set(general[block::RCX].get());
        self.block().segments.set(self.block().return_segments.get());
        self.set_flags(general[block::R11].get());
        self.show_stepped_code();
    }

    fn halt(&mut self) {
        self.step_was_left();
        match self.processor() {
            _ if self.interruptible() => self.service_and_wait(),
            None => self.end(End::Halted, ""),
            Some(one) => self.park(one),
        }
    }

    /// Sleeps until this processor is started again. The machine has halted when all processors
    /// sleep so.
    fn park(&mut self, one: Processor) {
        let rip = self.block().registers.rip.get();
        one.park();
        loop {
            self.service();
            if self.block().registers.rip.get() != rip {
                return;
            }
            if one.is_first() && one.are_all_parked() {
                self.end(End::Halted, "");
            }
            self.devices.flush();
            smp::sleep();
        }
    }

    fn service_and_wait(&mut self) {
        let rip = self.block().registers.rip.get();
        loop {
            self.service();
            if self.block().registers.rip.get() != rip || !self.interruptible() || self.is_stepping() {
                return;
            }
            self.save_if_wanted();
            self.obey_template(Work::Idle);
            self.devices.flush();
            smp::sleep();
        }
    }

    fn cpuid(&mut self) {
        let general = &self.block().registers.general;
        let number = general[block::RAX].get() as u32;
        let mut leaf = cpuid::guest(number, general[block::RCX].get() as u32, self.vcpu.cr4);
        if self.placement.isolated().is_some() {
            cpuid::separate_programs(number, &mut leaf);
        }
        if self.placement.per_space().is_some() {
            cpuid::keep_translations(number, &mut leaf);
        }
        if let Some(one) = self.processor() {
            cpuid::be_one_of(one.number, one.count, number, &mut leaf);
        }
        general[block::RAX].set(leaf[0].into());
        general[block::RBX].set(leaf[1].into());
        general[block::RCX].set(leaf[2].into());
        general[block::RDX].set(leaf[3].into());
    }

    /// Emulates XSETBV. The host has chosen the states already, so fewer of them change nothing.
    fn set_extended(&mut self) -> Done {
        let (index, value) = (self.block().registers.general[block::RCX].get() as u32, self.pair());
        if index != 0 || value & !cpuid::extended_states() != 0 {
            return Err(Exception::PROTECTION);
        }
        self.vcpu.xcr0 = value;
        Ok(())
    }

    fn read_msr(&mut self) {
        let index = self.block().registers.general[block::RCX].get() as u32;
        let value = match index {
            // SAFETY: The time stamp counter can be read wherever RDTSC is not forbidden, which was
            // checked at the start.
            0x10 => unsafe { _rdtsc() },
            CONTROLLER_BASE if self.local.is_some() => self.apic().map_or(0, Apic::base),
            DEADLINE if self.local.is_some() => self.apic().map_or(0, Apic::deadline),
            0xC000_0080 => self.vcpu.efer,
            0xC000_0081 => self.vcpu.star,
            0xC000_0082 => self.block().lstar.get(),
            0xC000_0084 => self.vcpu.syscall_mask,
            0xC000_0100 => self.block().fs.get(),
            0xC000_0101 => self.block().gs.get(),
            0xC000_0102 => self.block().gs_other.get(),
            _ => self.other_registers.get(&index).copied().unwrap_or_else(|| {
                if self.verbose {
                    eprintln!("mercury hosted: the guest reads the unknown register {index:#x}\r");
                }
                0
            }),
        };
        self.set_pair(value);
    }

    fn write_msr(&mut self) {
        let (index, value) = (self.block().registers.general[block::RCX].get() as u32, self.pair());
        match (index, self.apic_mut()) {
            (CONTROLLER_BASE, Some(_)) => return,
            (DEADLINE, Some(apic)) => {
                apic.set_deadline(value);
                return self.check_devices();
            }
            _ => {}
        }
        match index {
            0xC000_0080 => self.vcpu.efer = value,
            0xC000_0081 => self.set_star(value),
            0xC000_0082 => self.block().lstar.set(value),
            0xC000_0084 => self.vcpu.syscall_mask = value,
            0xC000_0100 => self.block().fs.set(value),
            0xC000_0101 => self.block().gs.set(value),
            0xC000_0102 => self.block().gs_other.set(value),
            _ => {
                self.other_registers.insert(index, value);
            }
        }
    }

    fn set_star(&mut self, value: u64) {
        self.vcpu.star = value;
        let (to_kernel, to_program) = ((value >> 32) as u16 & !3, (value >> 48) as u16 | 3);
        self.block().call_segments.set(Segments { cs: to_kernel, ss: to_kernel.wrapping_add(8) });
        self.block()
            .return_segments
            .set(Segments { cs: to_program.wrapping_add(16), ss: to_program.wrapping_add(8) });
    }

    fn read_control(&mut self, instruction: &Instruction) -> Done {
        let value = match instruction.op1_register() {
            Register::CR0 => self.vcpu.cr0,
            Register::CR2 => self.block().cr2.get(),
            Register::CR3 => self.vcpu.cr3,
            Register::CR4 => self.vcpu.cr4,
            Register::CR8 => self.vcpu.cr8,
            _ => return Err(Exception::UNDEFINED),
        };
        self.set(instruction, 0, value)
    }

    fn write_control(&mut self, instruction: &Instruction) -> Done {
        let value = self.get(instruction, 1)?;
        match instruction.op0_register() {
            Register::CR0 => self.vcpu.cr0 = value,
            Register::CR2 => self.block().cr2.set(value),
            Register::CR3 => {
                self.counters.switches += 1;
                self.load_tables(value & !NO_FLUSH, value & NO_FLUSH == 0);
            }
            Register::CR4 => {
                if (self.vcpu.cr4 ^ value) & CR4_GLOBAL != 0 {
                    self.flush_all();
                }
                self.vcpu.cr4 = value;
            }
            Register::CR8 => self.vcpu.cr8 = value,
            _ => return Err(Exception::UNDEFINED),
        }
        Ok(())
    }

    fn port_in(&mut self, instruction: &Instruction) -> Done {
        let port = self.port(instruction, 1)?;
        let register = instruction.op0_register();
        let value = self.devices.read(port, register.size());
        self.set_register(register, value.into());
        Ok(())
    }

    fn port_out(&mut self, instruction: &Instruction) -> Done {
        let port = self.port(instruction, 0)?;
        let register = instruction.op1_register();
        let value = self.general(register).get() as u32;
        self.devices.write(port, register.size(), value);
        self.check_devices();
        Ok(())
    }

    /// Answers a write to a device: it may have raised an interrupt, or ended the machine.
    pub(super) fn check_devices(&mut self) {
        if self.has_interrupt() {
            crate::machine::pending().store(1, std::sync::atomic::Ordering::Release);
        }
        if let Some(how) = self.devices.ended() {
            self.end(how, "");
        }
    }

    fn port(&mut self, instruction: &Instruction, operand: u32) -> Result<u16, Exception> {
        if instruction.op_kind(operand) == OpKind::Register {
            return Ok(self.general(Register::DX).get() as u16);
        }
        let port = instruction.try_immediate(operand).map_err(|_| Exception::UNDEFINED)?;
        Ok(port as u16)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use iced_x86::{Decoder, DecoderOptions};

    use super::*;
    use crate::{layout::DIRECT_MAP, machine::tests::with_machine, mmu::Privilege};

    /// Emulates instructions one after the other.
    fn emulate(machine: &mut Machine, code: &[u8]) {
        for instruction in &mut Decoder::with_ip(64, code, DIRECT_MAP + 0x1000, DecoderOptions::NONE) {
            machine.block().registers.rip.set(instruction.next_ip());
            machine.emulate(&instruction).unwrap();
        }
    }

    #[test]
    fn the_bases_of_gs_are_exchanged() {
        with_machine(|machine| {
            let block = machine.block();
            block.gs.set(1);
            block.gs_other.set(2);
            emulate(machine, &[0x0F, 0x01, 0xF8]);
            assert_eq!((block.gs.get(), block.gs_other.get()), (2, 1));
        });
    }

    #[test]
    fn flags_go_to_the_stack_and_come_back() {
        with_machine(|machine| {
            let block = machine.block();
            block.registers.general[block::RSP].set(DIRECT_MAP + 0x2000);
            // STI; PUSHFQ; CLI
            emulate(machine, &[0xFB, 0x9C, 0xFA]);
            assert!(!machine.interruptible());
            assert_eq!(machine.read_long(DIRECT_MAP + 0x1FF8), Ok(2 | IF));
            // POPFQ
            emulate(machine, &[0x9D]);
            assert!(machine.interruptible());
            assert_eq!(block.registers.general[block::RSP].get(), DIRECT_MAP + 0x2000);
        });
    }

    #[test]
    fn a_register_is_written_while_another_is_read() {
        with_machine(|machine| {
            let block = machine.block();
            block.registers.general[block::RCX].set(0xC000_0101);
            block.registers.general[block::RAX].set(0x9ABC_DEF0);
            block.registers.general[block::RDX].set(0x1234);
            // WRMSR to the base of GS; the register is read back into RAX and RDX after they were cleared.
            emulate(machine, &[0x0F, 0x30]);
            assert_eq!(block.gs.get(), 0x1234_9ABC_DEF0);
            block.registers.general[block::RAX].set(0);
            block.registers.general[block::RDX].set(0);
            emulate(machine, &[0x0F, 0x32]);
            let general = &block.registers.general;
            assert_eq!((general[block::RAX].get(), general[block::RDX].get()), (0x9ABC_DEF0, 0x1234));
        });
    }

    #[test]
    fn an_interrupt_s_return_loads_all_that_its_frame_has() {
        with_machine(|machine| {
            let block = machine.block();
            let frame = [0x40_1000_u64, 0x33, 0x202, 0x7000, 0x2B];
            let top = DIRECT_MAP + 0x3000;
            for (word, at) in frame.iter().zip((top..).step_by(8)) {
                machine.write(at, &word.to_le_bytes()).unwrap();
            }
            block.registers.general[block::RSP].set(top);
            // IRETQ
            emulate(machine, &[0x48, 0xCF]);
            assert_eq!(
                (block.registers.rip.get(), block.registers.general[block::RSP].get()),
                (0x40_1000, 0x7000)
            );
            assert_eq!(block.segments.get(), Segments { cs: 0x33, ss: 0x2B });
            assert_eq!((machine.privilege(), machine.interruptible()), (Privilege::User, true));
        });
    }
}
