//! The host's end of the agent's protocol: jobs in the machine, and their output.

use std::{
    collections::HashMap,
    fs::File,
    os::fd::OwnedFd,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, Ordering},
        mpsc::{Receiver, Sender, channel},
    },
    thread,
    time::{Duration, Instant},
};

use mercury_lab_agent::protocol::{self, Event, Hello, Request, VERSION, send};
use rustix::net::{Shutdown, shutdown};

use crate::error::{Context, Error, Result};

#[derive(Debug, Default)]
struct State {
    hello: Option<Hello>,
    /// The number of boots seen. A hello with a new boot ID counts as one more.
    boots: u32,
    gone: bool,
    jobs: HashMap<u32, Sender<Event>>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A connection to a machine's agent.
#[derive(Debug)]
pub struct Client {
    socket: Mutex<File>,
    shared: Arc<Shared>,
}

/// The number of the next job. No two connections have the same: a machine that moves to another takes its
/// jobs along, which go on to report there.
static NEXT: AtomicU32 = AtomicU32::new(1);

impl Client {
    /// Listens on a connected socket of any family.
    ///
    /// # Errors
    /// If the socket cannot be shared.
    pub fn new(socket: impl Into<OwnedFd>) -> Result<Self> {
        let socket = File::from(socket.into());
        let reader = socket.try_clone().context(|| "share the agent's socket".into())?;
        let shared = Arc::new(Shared::default());
        let own = Arc::clone(&shared);
        thread::spawn(move || listen(reader, &own));
        Ok(Self { socket: Mutex::new(socket), shared })
    }

    /// Returns how often the machine has booted, as far as the agent has reported.
    #[must_use]
    pub fn boots(&self) -> u32 {
        self.shared.lock().boots
    }

    /// Returns the agent's introduction, if one has come since `boots` boots.
    ///
    /// # Errors
    /// If the agent speaks another version of the protocol, or the machine has gone.
    pub fn hello_after(&self, boots: u32, patience: Duration) -> Result<Option<Hello>> {
        let state = self.shared.lock();
        let waiting = |state: &mut State| !state.gone && state.boots <= boots;
        let waited = self.shared.changed.wait_timeout_while(state, patience, waiting);
        let state = waited.unwrap_or_else(PoisonError::into_inner).0;
        if state.gone {
            return Err(Error::Gone("waiting for the agent".into()));
        }
        match &state.hello {
            Some(hello) if state.boots > boots && hello.version != VERSION => Err(Error::Host(format!(
                "the agent in the machine speaks version {} of the protocol, not {VERSION}",
                hello.version
            ))),
            Some(hello) if state.boots > boots => Ok(Some(hello.clone())),
            _ => Ok(None),
        }
    }

    /// Begins a job. Returns the job's number and the receiver of the job's events.
    pub fn begin(&self) -> (u32, Receiver<Event>) {
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let (sender, events) = channel();
        let mut state = self.shared.lock();
        if !state.gone {
            state.jobs.insert(id, sender);
        }
        (id, events)
    }

    /// Forgets a job.
    pub fn end(&self, id: u32) {
        self.shared.lock().jobs.remove(&id);
    }

    /// Sends a request.
    ///
    /// # Errors
    /// If the machine has gone.
    pub fn send(&self, request: &Request) -> Result<()> {
        let mut socket = self.socket.lock().unwrap_or_else(PoisonError::into_inner);
        send(&mut *socket, request).map_err(|_| Error::Gone("asking the agent".into()))
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let socket = self.socket.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = shutdown(&*socket, Shutdown::Both);
    }
}

fn listen(socket: File, shared: &Shared) {
    let mut events = protocol::Receiver::new(socket);
    while let Ok(Some(event)) = events.receive::<Event>() {
        let mut state = shared.lock();
        match (event.job(), event) {
            (Some(id), event) => {
                if let Some(job) = state.jobs.get(&id) {
                    let _ = job.send(event);
                }
            }
            (None, Event::Hello(hello)) => take_hello(&mut state, hello),
            (None, _) => {}
        }
        shared.changed.notify_all();
    }
    let mut state = shared.lock();
    state.gone = true;
    state.jobs.clear();
    shared.changed.notify_all();
}

/// Takes the agent's introduction in. A new boot ends all jobs of the boot before.
fn take_hello(state: &mut State, hello: Hello) {
    if state.hello.as_ref().is_none_or(|old| old.boot_id != hello.boot_id) {
        state.boots += 1;
        state.jobs.clear();
    }
    state.hello = Some(hello);
}

/// Returns the next event of a job, within the time that is left until `end`.
///
/// # Errors
/// If the time is up (`Ok(None)`), or the machine has gone.
pub fn next_event(events: &Receiver<Event>, end: Instant, what: &str) -> Result<Option<Event>> {
    use std::sync::mpsc::RecvTimeoutError::{Disconnected, Timeout};
    match events.recv_timeout(end.saturating_duration_since(Instant::now())) {
        Ok(event) => Ok(Some(event)),
        Err(Timeout) => Ok(None),
        Err(Disconnected) => Err(Error::Gone(what.to_owned())),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    fn hello(boot_id: &str) -> Event {
        Event::Hello(Hello { version: VERSION, kernel: "6.1".into(), boot_id: boot_id.into() })
    }

    #[test]
    fn a_second_boot_ends_the_jobs_of_the_first() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let client = Client::new(ours).unwrap();
        send(&mut theirs, &hello("one")).unwrap();
        assert!(client.hello_after(0, Duration::from_secs(5)).unwrap().is_some());
        let (id, events) = client.begin();
        send(&mut theirs, &Event::Started { id, pid: 7 }).unwrap();
        let end = Instant::now() + Duration::from_secs(5);
        assert_eq!(next_event(&events, end, "job").unwrap(), Some(Event::Started { id, pid: 7 }));
        send(&mut theirs, &hello("one")).unwrap();
        send(&mut theirs, &hello("two")).unwrap();
        assert!(client.hello_after(1, Duration::from_secs(5)).unwrap().is_some());
        assert!(matches!(next_event(&events, end, "job"), Err(Error::Gone(_))));
    }

    /// Stands for a machine that has moved here, where a command of its former place still prints.
    #[test]
    fn a_job_of_another_connection_is_no_job_here() {
        let ((left, _right), (ours, mut theirs)) = (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
        let (former, client) = (Client::new(left).unwrap(), Client::new(ours).unwrap());
        send(&mut theirs, &hello("one")).unwrap();
        assert!(client.hello_after(0, Duration::from_secs(5)).unwrap().is_some());
        let ((old, _), (id, events)) = (former.begin(), client.begin());
        send(&mut theirs, &Event::Stdout { id: old, data: b"moved".to_vec() }).unwrap();
        send(&mut theirs, &Event::Stdout { id, data: b"7".to_vec() }).unwrap();
        let end = Instant::now() + Duration::from_secs(5);
        let first = next_event(&events, end, "job").unwrap();
        assert_eq!(first, Some(Event::Stdout { id, data: b"7".to_vec() }));
    }

    #[test]
    fn another_version_is_refused_by_name() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let client = Client::new(ours).unwrap();
        let hello = Hello { version: VERSION + 1, kernel: String::new(), boot_id: "x".into() };
        send(&mut theirs, &Event::Hello(hello)).unwrap();
        let error = client.hello_after(0, Duration::from_secs(5)).unwrap_err();
        assert!(error.to_string().contains("version 2"), "{error}");
    }

    #[test]
    fn a_machine_that_goes_ends_its_jobs() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let client = Client::new(ours).unwrap();
        let (_, events) = client.begin();
        drop(theirs);
        let end = Instant::now() + Duration::from_secs(5);
        assert!(matches!(next_event(&events, end, "job"), Err(Error::Gone(_))));
    }
}
