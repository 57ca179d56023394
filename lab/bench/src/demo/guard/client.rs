//! The client of the web service, outside of the machine.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    net::{Ipv4Addr, TcpStream},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// Pause between two requests, and before another connection.
const PAUSE: Duration = Duration::from_millis(20);
/// Time in which an answer has to come, before the client tries another connection.
const ANSWERS_WITHIN: Duration = Duration::from_secs(10);

/// The client's account.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Account {
    /// Requests that were answered.
    pub answered: u64,
    /// Connections that broke after they had brought an answer.
    pub broken: u64,
    /// The longest time without an answer, since somebody took that time last.
    pub longest: Duration,
}

/// A client that asks all the time, on one connection as long as that holds.
pub struct Client {
    end: Arc<AtomicBool>,
    account: Arc<Mutex<Account>>,
    thread: Option<JoinHandle<()>>,
}

impl Client {
    /// Starts a client of the service behind this port of the host.
    pub fn start(port: u16) -> Self {
        let (end, account) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Account::default())));
        let own = (Arc::clone(&end), Arc::clone(&account));
        let thread = thread::spawn(move || work(port, &own.0, &own.1));
        Self { end, account, thread: Some(thread) }
    }

    /// Returns the account so far.
    pub fn account(&self) -> Account {
        *self.account.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the longest time without an answer so far, and begins anew.
    pub fn take_longest(&self) -> Duration {
        std::mem::take(&mut self.account.lock().unwrap_or_else(PoisonError::into_inner).longest)
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.end.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn work(port: u16, end: &AtomicBool, account: &Mutex<Account>) {
    let mut last = None;
    while !end.load(Ordering::Relaxed) {
        let connection = TcpStream::connect((Ipv4Addr::LOCALHOST, port));
        let answered = connection.and_then(|connection| talk(connection, end, account, &mut last));
        if answered.is_ok_and(|answered| answered > 0) && !end.load(Ordering::Relaxed) {
            account.lock().unwrap_or_else(PoisonError::into_inner).broken += 1;
        }
        thread::sleep(PAUSE);
    }
}

/// Asks until the connection breaks. Returns the number of answers.
fn talk(
    connection: TcpStream,
    end: &AtomicBool,
    account: &Mutex<Account>,
    last: &mut Option<Instant>,
) -> io::Result<u64> {
    connection.set_read_timeout(Some(ANSWERS_WITHIN))?;
    let mut stream = BufReader::new(connection);
    let mut answered = 0;
    while !end.load(Ordering::Relaxed) && ask(&mut stream).is_ok() {
        answered += 1;
        let now = Instant::now();
        let mut account = account.lock().unwrap_or_else(PoisonError::into_inner);
        account.answered += 1;
        account.longest = account.longest.max(last.map_or(Duration::ZERO, |last| now - last));
        drop(account);
        *last = Some(now);
        thread::sleep(PAUSE);
    }
    Ok(answered)
}

/// Sends a request and reads its answer.
fn ask(stream: &mut BufReader<TcpStream>) -> io::Result<()> {
    stream.get_mut().write_all(b"GET / HTTP/1.1\r\nHost: demo\r\n\r\n")?;
    let (mut line, mut length) = (String::new(), None);
    loop {
        line.clear();
        if stream.read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        match line.trim_end().split_once(": ") {
            Some(("Content-Length", text)) => length = text.parse().ok(),
            None if line.trim_end().is_empty() => break,
            _ => {}
        }
    }
    let mut body = vec![0; length.ok_or(io::ErrorKind::InvalidData)?];
    stream.read_exact(&mut body)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    /// Answers so many requests on a connection, and breaks it.
    fn serve(listener: &TcpListener, answers: u32) {
        let (connection, _) = listener.accept().unwrap();
        let mut lines = BufReader::new(connection.try_clone().unwrap()).lines();
        for _ in 0..answers {
            while !lines.next().unwrap().unwrap().is_empty() {}
            (&connection).write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n17").unwrap();
        }
    }

    #[test]
    fn broken_connections_are_counted_if_they_have_worked() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = Client::start(listener.local_addr().unwrap().port());
        [3, 0, 2].into_iter().for_each(|answers| serve(&listener, answers));
        serve(&listener, 1);
        while client.account().broken < 3 {
            thread::sleep(PAUSE);
        }
        let account = client.account();
        assert_eq!((account.answered, account.broken), (6, 3));
        assert!(account.longest >= PAUSE);
        drop(listener);
    }
}
