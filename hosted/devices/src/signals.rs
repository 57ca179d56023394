//! Threads that wait for a device's descriptor, and the way in which they tell the monitor.

use std::{
    io,
    sync::{Arc, mpsc},
    thread,
};

/// Tells the thread that serves a device that the device has work. Any thread may call it.
pub type Waker = Arc<dyn Fn() + Send + Sync>;

/// Starts a thread that gets no signals, and waits until it runs: a monitor may soon forbid the system
/// calls that a thread makes at its beginning.
///
/// # Errors
/// If the host has no room for a thread.
pub fn start_thread(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let (ready, begun) = mpsc::channel();
    without_signals(|| {
        thread::Builder::new().name(name.to_owned()).spawn(move || {
            let _ = ready.send(());
            work();
        })
    })?;
    let _ = begun.recv();
    Ok(())
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
