//! The machine's side of a debugger.

use super::Machine;
use crate::gdb::Debugger;

impl Machine {
    /// Lets the debugger work on the machine, which does not contain the debugger meanwhile.
    fn debug<T>(&mut self, what: impl FnOnce(&mut Debugger, &mut Self) -> T) -> Option<T> {
        let mut debugger = self.debugger.take()?;
        let done = what(&mut debugger, self);
        self.debugger = Some(debugger);
        Some(done)
    }

    /// Returns true if gdb wants the machine to stop.
    #[must_use]
    pub fn is_debugger_wanted(&self) -> bool {
        self.debugger.as_ref().is_some_and(|debugger| debugger.is_wanted())
    }

    /// Stops for gdb if gdb wants that.
    pub fn attend_debugger(&mut self) {
        if self.is_debugger_wanted() {
            self.debug(Debugger::attend);
        }
    }

    /// Returns true if interrupts have to wait because gdb steps one instruction.
    #[must_use]
    pub fn is_stepping(&self) -> bool {
        self.debugger.as_ref().is_some_and(|debugger| debugger.holds_interrupts())
    }

    /// Returns true if gdb has a breakpoint at an address.
    #[must_use]
    pub fn has_breakpoint(&self, at: u64) -> bool {
        self.debugger.as_ref().is_some_and(|debugger| debugger.has_breakpoint(at))
    }

    /// Ends the wait of interrupts: a step has led somewhere else.
    pub fn step_was_left(&mut self) {
        if let Some(debugger) = &mut self.debugger {
            debugger.release_interrupts();
        }
    }

    /// Answers INT3. Returns true if it was a breakpoint of gdb.
    pub fn breakpoint(&mut self) -> bool {
        let at = self.block().registers.rip.get().wrapping_sub(1);
        if !self.has_breakpoint(at) {
            return false;
        }
        self.block().registers.rip.set(at);
        self.debug(Debugger::stopped);
        true
    }
}
