//! The control socket: a client sends a line, `status` or `stop`, and gets a line of JSON.

use crate::state::{Facts, State};
use mercury_control::{
    error::{Error, Result},
    exit::Exit,
};
use mercury_devices::signals::start_thread;
use mercury_guest::run::Handle;
use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    sync::Arc,
    time::Duration,
};

/// Time for a client to ask and to read its answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// Largest length of a line.
const LINE_MAX: u64 = 64;

/// A guest as its control socket sees it.
pub trait Guest: Send + Sync {
    fn stop(&self);
    fn own_memory(&self) -> Option<u64>;
}

impl Guest for Handle {
    fn stop(&self) {
        Handle::stop(self);
    }

    fn own_memory(&self) -> Option<u64> {
        Handle::own_memory(self)
    }
}

/// The answers of a guest that runs.
pub struct Control {
    guest: Box<dyn Guest>,
    facts: Facts,
}

impl Control {
    pub fn new(guest: impl Guest + 'static, facts: Facts) -> Arc<Self> {
        Arc::new(Self { guest: Box::new(guest), facts })
    }

    /// Returns the facts as they are now.
    pub fn facts(&self) -> Facts {
        Facts { monitor_bytes: self.guest.own_memory(), ..self.facts.clone() }
    }

    /// Starts to answer.
    ///
    /// # Errors
    /// There can be no socket.
    pub fn listen(self: &Arc<Self>, state: &State) -> Result<()> {
        let path = state.folder().join("control.sock");
        let wrong =
            |error| Error::new(Exit::Failed, format!("cannot make the socket {}: {error}", path.display()));
        let _ = fs::remove_file(&path);
        let listener = UnixListener::bind(&path).map_err(wrong)?;
        let control = Arc::clone(self);
        start_thread("control", move || {
            for client in listener.incoming().flatten() {
                control.answer(&client);
            }
        })
        .map_err(wrong)
    }

    fn answer(&self, mut client: &UnixStream) {
        let _ = client.set_read_timeout(Some(PATIENCE));
        let _ = client.set_write_timeout(Some(PATIENCE));
        let mut line = String::new();
        let _ = BufReader::new(client.take(LINE_MAX)).read_line(&mut line);
        let answer = match line.trim() {
            "status" => serde_json::to_string(&self.facts()).unwrap_or_default(),
            "stop" => r#"{"stopping":true}"#.to_owned(),
            _ => r#"{"error":"send status or stop"}"#.to_owned(),
        };
        // A client that is gone needs no answer.
        let _ = client.write_all((answer + "\n").as_bytes());
        if line.trim() == "stop" {
            self.guest.stop();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        path::Path,
        sync::atomic::{AtomicBool, Ordering},
    };

    struct Stopped(Arc<AtomicBool>);

    impl Guest for Stopped {
        fn stop(&self) {
            self.0.store(true, Ordering::SeqCst);
        }

        fn own_memory(&self) -> Option<u64> {
            Some(7 << 20)
        }
    }

    #[test]
    fn clients_ask_for_the_status_and_stop_the_guest() {
        let parent = tempfile::tempdir().expect("a folder");
        let state = State::make("node7", Some(parent.path())).expect("made");
        let is_stopped = Arc::new(AtomicBool::new(false));
        let facts = Facts::new("node7", Path::new("/image"), &mercury_image::Machine::default()).running();
        let control = Control::new(Stopped(Arc::clone(&is_stopped)), facts);
        control.listen(&state).expect("a socket");
        let ask = |line: &str| {
            let mut client = UnixStream::connect(parent.path().join("control.sock")).expect("a socket");
            client.write_all(line.as_bytes()).expect("asked");
            let mut answer = String::new();
            client.read_to_string(&mut answer).expect("answered");
            answer
        };
        let status = ask("status\n");
        assert!(
            status.contains(r#""state":"running""#) && status.contains(r#""monitor_bytes":7340032"#),
            "{status}"
        );
        assert!(ask("launch\n").contains("error"));
        assert!(ask(&("x".repeat(50) + "\n")).contains("error"));
        assert!(!is_stopped.load(Ordering::SeqCst));
        assert!(ask("stop\n").contains("stopping"));
        let start = std::time::Instant::now();
        while !is_stopped.load(Ordering::SeqCst) {
            assert!(start.elapsed() < Duration::from_secs(10));
        }
    }
}
