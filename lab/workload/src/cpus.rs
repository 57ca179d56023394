//! The CPUs that a process may use, and threads that stay on one CPU.

use std::{io, mem, thread};

use crate::{Result, report::Report, stop::Stop};

/// Returns the CPUs that this process may run on.
pub fn usable() -> Result<Vec<usize>> {
    // SAFETY: a set of all zeros is an empty set; the kernel writes no more than its size.
    let set = unsafe {
        let mut set: libc::cpu_set_t = mem::zeroed();
        check(libc::sched_getaffinity(0, size_of_val(&set), &raw mut set))?;
        set
    };
    // SAFETY: the numbers are below the set's size.
    Ok((0..libc::CPU_SETSIZE as usize).filter(|cpu| unsafe { libc::CPU_ISSET(*cpu, &set) }).collect())
}

/// Keeps the calling thread on one CPU.
pub fn pin(cpu: usize) -> Result<()> {
    // SAFETY: as in `usable`; the set is only read by the kernel.
    unsafe {
        let mut set: libc::cpu_set_t = mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        check(libc::sched_setaffinity(0, size_of_val(&set), &raw const set))?;
    }
    Ok(())
}

/// Gives the calling thread a real-time priority.
pub fn fifo(priority: i32) -> Result<()> {
    let param = libc::sched_param { sched_priority: priority };
    // SAFETY: the kernel only reads `param`.
    check(unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const param) })?;
    Ok(())
}

/// Turns a result of -1 into the error.
pub fn check(result: i32) -> io::Result<i32> {
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Runs `work` on a thread of each CPU until the workload ends, and collects the reports.
pub fn on_each(
    stop: &Stop,
    report: &mut Report,
    work: impl Fn(usize, &Stop, &mut Report) -> Result<()> + Sync,
) -> Result<()> {
    let cpus = usable()?;
    report.fact("cpus", cpus.len());
    let one = |cpu: usize| {
        let mut report = Report::default();
        let result = pin(cpu).and_then(|()| work(cpu, stop, &mut report));
        if let Err(error) = result {
            report.violation(format!("CPU {cpu}: {error}"));
            stop.set();
        }
        report
    };
    thread::scope(|scope| {
        let one = &one;
        let threads: Vec<_> = cpus.iter().map(|&cpu| scope.spawn(move || one(cpu))).collect();
        stop.wait();
        for thread in threads {
            match thread.join() {
                Ok(part) => report.merge(part),
                Err(_) => report.violation("a thread panicked"),
            }
        }
    });
    Ok(())
}
