//! Interrupts and exceptions: their sources and their delivery.

use std::sync::atomic::Ordering;

use super::{End, Exception, Machine, Step, pending};
use crate::{
    block,
    block::IF,
    mmu::Privilege,
    process::per_space::Request,
    signal,
    smp::{self, apic::Apic},
    thunks,
    vcpu::{ALIGNMENT, PROGRAMS_OWN},
};

impl Machine {
    /// Moves the guest back before the instruction that names an exit, if an interrupt came between
    /// that and the jump to the monitor. The interrupt's handler uses other exits, so the name must
    /// be written again.
    pub fn restart_exit(&mut self) {
        let registers = &self.block().registers;
        if self.code.is_exit_jump(registers.rip.get()) {
            registers.rip.set(registers.rip.get() - thunks::NAMING_LENGTH);
        }
    }

    /// Polls the devices, and delivers an interrupt if there is one and the guest takes it.
    pub fn service(&mut self) {
        if self.ask_first_process(Request::Service) {
            return;
        }
        pending().store(0, Ordering::Release);
        self.attend_debugger();
        if self.is_stepping() {
            // Interrupts come after the step.
            return;
        }
        self.attend();
        self.devices.poll();
        if let Some(local) = &mut self.local {
            local.processor.acknowledge_call();
            local.apic.poll();
        }
        if self.interruptible()
            && let Some(vector) = self.acknowledge()
        {
            self.counters.interrupts += 1;
            self.inject(Exception { vector, error: None, address: None });
        }
        if self.has_interrupt() {
            pending().store(1, Ordering::Release);
        }
        if let Some(how) = self.devices.ended() {
            self.end(how, "");
        }
    }

    /// Answers calls, and delivers a waiting interrupt if the guest takes it.
    pub fn deliver_pending(&mut self) {
        self.attend();
        if self.interruptible() && pending().load(Ordering::Acquire) != 0 {
            self.service();
        }
    }

    /// Returns the vector of the interrupt that is delivered now.
    fn acknowledge(&mut self) -> Option<u8> {
        let vector = self.apic_mut().and_then(Apic::acknowledge);
        vector.or_else(|| self.devices.acknowledge())
    }

    /// Returns true if an interrupt waits.
    #[must_use]
    pub fn has_interrupt(&self) -> bool {
        self.devices.has_interrupt() || self.apic().is_some_and(Apic::has_interrupt)
    }

    /// Answers events that do not wait until the guest takes interrupts:
    ///
    /// - Another processor has called. It asks the first one for a device, or it has reset this
    ///   one, which then waits to be started.
    /// - The machine must end.
    pub fn attend(&mut self) {
        if self.ask_first_process(Request::Service) {
            return;
        }
        smp::called().store(0, Ordering::SeqCst);
        if signal::is_disk_lost() {
            self.end(End::Broken, signal::DISK_HAS_CHANGED);
        }
        if signal::is_end_wanted() {
            self.end(End::Ended, "ended by a signal");
        }
        if signal::is_child_gone() {
            self.end(End::Broken, &signal::how_child_has_ended());
        }
        let Some(one) = self.processor() else { return };
        if one.is_first() {
            self.devices.serve(&one);
            if self.has_interrupt() {
                pending().store(1, Ordering::Release);
            }
        } else if one.is_reset() {
            while !one.starts() {
                smp::sleep();
                pending().store(0, Ordering::Release);
            }
            self.begin();
        }
    }

    /// Begins at the place that the first processor has chosen. This processor is another one.
    fn begin(&mut self) {
        self.drop_all();
        if let Some(local) = &mut self.local {
            local.processor.acknowledge_call();
            local.apic.reset();
        }
        let bringup = self.local.as_ref().map(|local| local.bringup);
        let begun = bringup.is_some_and(|bringup| bringup.begin(self).is_ok());
        if !begun {
            self.end(End::Broken, "a processor was started without a stack");
        }
    }

    /// Delivers an exception or an interrupt as the processor would.
    pub fn inject(&mut self, exception: Exception) {
        self.step_was_left();
        if let Some(address) = exception.address {
            self.block().cr2.set(address);
        }
        if let Err(second) = self.deliver(exception) {
            let why = format!("the guest cannot take {exception:x?}: {second:x?}");
            self.end(End::Broken, &why);
        }
    }

    fn deliver(&mut self, exception: Exception) -> Result<(), Exception> {
        let at = u64::from(exception.vector) * 16;
        if at + 15 > u64::from(self.vcpu.idt.limit) {
            return Err(Exception::PROTECTION);
        }
        let low = self.read_long(self.vcpu.idt.base.wrapping_add(at))?;
        let high = self.read_long(self.vcpu.idt.base.wrapping_add(at + 8))?;
        if low >> 47 & 1 == 0 {
            return Err(Exception::PROTECTION);
        }
        let target = low & 0xFFFF | low >> 32 & 0xFFFF_0000 | high << 32;
        let from_user = self.privilege() == Privilege::User;
        let registers = &self.block().registers;
        let stack = match low >> 32 & 7 {
            0 if from_user => self.read_long(self.vcpu.task_base + 4)?,
            0 => registers.general[block::RSP].get(),
            list => self.read_long(self.vcpu.task_base + 0x24 + (list - 1) * 8)?,
        } & !15;
        let rip = self.visible(registers.rip.get());
        let words = [
            rip,
            u64::from(self.block().segments.get().cs),
            self.flags(),
            registers.general[block::RSP].get(),
            u64::from(self.block().segments.get().ss),
        ];
        let mut frame = Vec::with_capacity(48);
        frame.extend(exception.error.map(u64::from).iter().chain(&words).flat_map(|word| word.to_le_bytes()));
        let top = stack - frame.len() as u64;
        self.write(top, &frame)?;
        let is_trap = low >> 40 & 0xF == 0xF;
        self.set_flags(self.flags() & !(ALIGNMENT | PROGRAMS_OWN | if is_trap { 0 } else { IF }));
        registers.general[block::RSP].set(top);
        registers.rip.set(target);
        self.block().set_code_segment((low >> 16 & 0xFFFF) as u16);
        if from_user {
            self.block().set_stack_segment(0);
        }
        Ok(())
    }

    /// Does for INT with this number what the guest's processor would do. The host has taken it for
    /// a system call of its own.
    pub fn software_interrupt(&mut self, vector: u8) {
        const LENGTH: u64 = 2;
        let gate = self.read_long(self.vcpu.idt.base.wrapping_add(u64::from(vector) * 16)).unwrap_or(0);
        let (is_present, privilege) = (gate >> 47 & 1 == 1, gate >> 45 & 3);
        if is_present && privilege == 3 {
            return self.inject(Exception { vector, error: None, address: None });
        }
        let rip = &self.block().registers.rip;
        rip.set(rip.get().wrapping_sub(LENGTH));
        // The gate's number, and the bit for the table of gates.
        self.inject(Exception { error: Some(u32::from(vector) * 8 + 2), ..Exception::PROTECTION });
    }

    /// Answers a trap of a program: after a step, or by INT1.
    pub fn debug_trap(&mut self, step: Option<Step>) {
        let rip = self.block().registers.rip.get();
        let visible = self.visible(rip);
        match step {
            Some(_) if visible != rip => {
                // The program has made the jump of a rewritten site. The jump is not in its own code.
                self.block().registers.rip.set(visible);
                self.show_stepped_code();
            }
            Some(step) => self.stepped(step),
            None => self.debug_exception(0),
        }
    }
}
