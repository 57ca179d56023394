//! Selectors of data segments: ES, DS, FS and GS.
//!
//! Programs load them without a trap. So the CPU's own registers hold the guest's selectors, while the
//! guest's kernel and the monitor run, too: in 64-bit code only the bases of FS and GS have an effect, and
//! these are set before the guest goes on. The kernel reads and loads the registers when it changes tasks. A
//! process that goes on with the guest gets the selectors from the process that the guest has left.

use iced_x86::Register;

/// The registers whose selectors a task has, in the order of [`Selectors`].
pub const REGISTERS: [Register; 4] = [Register::ES, Register::DS, Register::FS, Register::GS];

/// The selectors of ES, DS, FS and GS.
pub type Selectors = [u16; 4];

/// Returns the CPU's selectors.
#[cfg(not(miri))]
#[must_use]
pub fn read() -> Selectors {
    let (es, ds, fs, gs): (u16, u16, u16, u16);
    // SAFETY: It reads registers that every process may read.
    unsafe {
        std::arch::asm!(
            "mov {es:e}, es", "mov {ds:e}, ds", "mov {fs:e}, fs", "mov {gs:e}, gs",
            es = out(reg) es, ds = out(reg) ds, fs = out(reg) fs, gs = out(reg) gs,
            options(nomem, nostack, preserves_flags)
        );
    }
    [es, ds, fs, gs]
}

/// Returns null selectors: Miri's CPU has no others.
#[cfg(miri)]
#[must_use]
pub fn read() -> Selectors {
    [0; 4]
}

/// Loads selectors into the CPU's registers. The base of FS stays the monitor's. The base of GS is lost: the
/// monitor does not use it.
///
/// In place of a selector that the host does not have for a process, such as the guest's kernel's own, the
/// null selector is loaded. A program may have chosen the selectors.
pub fn load(selectors: Selectors) {
    for ((register, old), new) in REGISTERS.into_iter().zip(read()).zip(selectors) {
        let new = if is_loadable(new) { new } else { 0 };
        if new != old {
            load_one(register, new);
        }
    }
}

/// Loads a selector into one of the CPU's registers, as [`load`] does. SS and CS stay as they are.
pub fn set(register: Register, selector: u16) {
    let mut all = read();
    if let Some(place) = REGISTERS.iter().position(|one| *one == register) {
        all[place] = selector;
        load(all);
    }
}

#[cfg(miri)]
fn is_loadable(_: u16) -> bool {
    false
}

/// Returns true if a process of the host may load a selector into a register for data.
#[cfg(not(miri))]
fn is_loadable(selector: u16) -> bool {
    let is_readable: u8;
    // SAFETY: VERR changes the zero flag only.
    unsafe {
        std::arch::asm!(
            "verr {selector:x}", "setz {is_readable}",
            selector = in(reg) selector, is_readable = out(reg_byte) is_readable, options(nomem, nostack)
        );
    }
    selector & !3 == 0 || is_readable != 0
}

#[cfg(miri)]
fn load_one(_: Register, _: u16) {}

#[cfg(not(miri))]
fn load_one(register: Register, selector: u16) {
    // SAFETY: The selector is null, or a process may read its segment. In 64-bit code ES, DS and GS have no
    // effect on the monitor. The base of FS is set again before anything uses it.
    unsafe {
        match register {
            Register::ES => {
                std::arch::asm!("mov es, {0:e}", in(reg) selector, options(nomem, nostack, preserves_flags));
            }
            Register::DS => {
                std::arch::asm!("mov ds, {0:e}", in(reg) selector, options(nomem, nostack, preserves_flags));
            }
            Register::GS => {
                std::arch::asm!("mov gs, {0:e}", in(reg) selector, options(nomem, nostack, preserves_flags));
            }
            _ => std::arch::asm!(
                "rdfsbase {base}", "mov fs, {selector:e}", "wrfsbase {base}",
                base = out(reg) _, selector = in(reg) selector, options(nomem, nostack, preserves_flags)
            ),
        }
    }
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use std::cell::Cell;

    use super::*;

    thread_local! {
        static OWN: Cell<u32> = const { Cell::new(7) };
    }

    /// Runs in a thread of its own, since threads have selectors of their own.
    fn elsewhere(what: impl FnOnce() + Send + 'static) {
        std::thread::spawn(what).join().expect("the thread");
    }

    #[test]
    fn selectors_are_loaded_and_thread_local_data_stays() {
        elsewhere(|| {
            OWN.set(8);
            for all in [[0x2B, 0x23, 0x33, 0x2B], [0, 0x2B, 0, 0x23], [0; 4]] {
                load(all);
                assert_eq!((read(), OWN.get()), (all, 8));
            }
            set(Register::FS, 0x2B);
            set(Register::SS, 0x2B);
            assert_eq!((read(), OWN.get()), ([0, 0, 0x2B, 0], 8));
        });
    }

    #[test]
    fn a_selector_of_no_process_becomes_the_null_selector() {
        elsewhere(|| {
            load([0x2B; 4]);
            // The kernel's code and data, a task, a local descriptor, and one beyond the table.
            load([0x10, 0x18, 0x40, 0xF]);
            assert_eq!(read(), [0; 4]);
            set(Register::GS, 0xFFFB);
            assert_eq!(read(), [0; 4]);
        });
    }
}
