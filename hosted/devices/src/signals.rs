//! Threads that wait for a device's descriptor, and the way in which they tell the monitor.

use std::{
    io,
    sync::{Arc, mpsc},
    thread::{self, JoinHandle},
};

/// Tells the thread that serves a device that the device has work. Any thread may call it.
pub type Waker = Arc<dyn Fn() + Send + Sync>;

/// Starts a thread that gets no signals, and waits until it runs.
///
/// # Errors
/// If the host has no room for a thread.
pub fn start_thread(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    without_signals(|| spawn(name, work)).map(drop)
}

/// Starts a thread, and waits until it runs: a monitor may soon forbid the system calls that a thread makes
/// at its beginning.
///
/// # Errors
/// If the host has no room for a thread.
pub fn spawn<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    let (ready, begun) = mpsc::channel();
    let thread = thread::Builder::new().name(name.to_owned()).spawn(move || {
        let _ = ready.send(());
        work()
    })?;
    let _ = begun.recv();
    Ok(thread)
}

/// Makes a thread that gets no signals: all of them are for the thread of the caller.
pub fn without_signals<T>(make: impl FnOnce() -> T) -> T {
    // SAFETY: The sets are filled by the calls, and the thread's mask is put back.
    unsafe {
        let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        let made = make();
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
        made
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// Returns true if a thread of this process has the name. A thread gives it to itself at its beginning.
    fn is_there(name: &str) -> bool {
        let threads = fs::read_dir("/proc/self/task").expect("the threads").flatten();
        let mut names = threads.filter_map(|thread| fs::read_to_string(thread.path().join("comm")).ok());
        names.any(|one| one.trim_end() == name)
    }

    /// Lets this thread and those that it starts run on one processor: a new thread then waits for its turn.
    fn stay_on_one_processor() {
        // SAFETY: The sets are filled by the calls, and outlive them.
        unsafe {
            let mut own: libc::cpu_set_t = std::mem::zeroed();
            let size = size_of_val(&own);
            assert_eq!(libc::sched_getaffinity(0, size, &raw mut own), 0);
            let first = (0..libc::CPU_SETSIZE as usize).find(|&cpu| libc::CPU_ISSET(cpu, &own));
            let mut one: libc::cpu_set_t = std::mem::zeroed();
            libc::CPU_SET(first.expect("a processor"), &mut one);
            assert_eq!(libc::sched_setaffinity(0, size, &raw const one), 0);
        }
    }

    #[test]
    fn a_thread_runs_when_its_start_returns() {
        stay_on_one_processor();
        let (end, ends) = mpsc::channel::<()>();
        let ends = Arc::new(std::sync::Mutex::new(ends));
        let threads: Vec<_> = (0..200)
            .map(|number| {
                let (name, ends) = (format!("begun-{number}"), Arc::clone(&ends));
                let thread =
                    spawn(&name, move || drop(ends.lock().map(|ends| ends.recv()))).expect("a thread");
                assert!(is_there(&name), "{name}");
                thread
            })
            .collect();
        drop(end);
        threads.into_iter().for_each(|thread| thread.join().expect("its end"));
    }
}
