//! Ports by the task's own bitmap: the permitted port can be used, its neighbour cannot. The bitmap
//! is after the task-state segment, whose limit includes it.

use crate::{
    Result, cpus,
    recover::{self, Fault, attempt},
    report::Report,
    stop::Stop,
};

/// The port to which firmware writes its progress, which is harmless.
const PERMITTED: u16 = 0x80;
const FORBIDDEN: u16 = 0x81;
const REFUSED: Option<Fault> = Some(Fault { signal: libc::SIGSEGV, in_place: true });

/// Uses ports on each CPU.
pub fn run(stop: &Stop, report: &mut Report) -> Result<()> {
    recover::install()?;
    cpus::on_each(stop, report, |cpu, stop, report| {
        while !stop.is_set() {
            permit(PERMITTED, true)?;
            for _ in 0..50 {
                let used = write_port(PERMITTED);
                report.check(used.is_none(), || format!("CPU {cpu}: a permitted port gave {used:?}"));
                let refused = write_port(FORBIDDEN);
                report.check(refused == REFUSED, || format!("CPU {cpu}: a forbidden port gave {refused:?}"));
            }
            permit(PERMITTED, false)?;
            let refused = write_port(PERMITTED);
            report.check(refused == REFUSED, || format!("CPU {cpu}: no more permitted, it gave {refused:?}"));
            report.pass();
        }
        Ok(())
    })
}

fn permit(port: u16, on: bool) -> Result<()> {
    // SAFETY: the port does nothing.
    cpus::check(unsafe { libc::ioperm(u64::from(port), 1, i32::from(on)) })?;
    Ok(())
}

fn write_port(port: u16) -> Option<Fault> {
    // SAFETY: the port does nothing, and a fault is recovered from.
    unsafe { attempt!("out dx, al", in("dx") port, in("al") 0u8) }
}
