//! The streams besides the first, at the source: pages go by them, each by a connection of its own
//! ([`mercury_migration::streams`]). Whichever thread has packed pages writes them.

use super::link::{self, io_error};
use crate::{
    error::{Error, Result},
    exit::Exit,
};
use mercury_migration::{
    hail::Secret,
    protocol::{Attempt, Word},
    session::{self, Line},
    streams::proof,
    wire::{Reader, Writer},
};
use rustls::{ClientConnection, StreamOwned};
use std::{
    io,
    net::{SocketAddr, TcpStream},
    os::fd::OwnedFd,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

type Tls = StreamOwned<ClientConnection, TcpStream>;

/// One of them.
#[derive(Debug)]
pub struct Lane {
    writer: Mutex<Writer<Tls>>,
    /// The same socket.
    socket: OwnedFd,
}

/// What an attempt's streams have in common.
#[derive(Clone, Copy, Debug)]
pub struct Whose<'a> {
    /// Where to.
    pub to: SocketAddr,
    /// The receiver's line.
    pub line: &'a Line,
    /// The attempt.
    pub attempt: Attempt,
    /// What went with the offer.
    pub secret: &'a Secret,
}

impl Lane {
    /// Opens one, and waits until the other end has taken it.
    ///
    /// # Errors
    /// If it does not.
    pub fn open(whose: &Whose<'_>, stream: u32, patience: Duration, control: Option<&str>) -> Result<Self> {
        let (tls, socket) = link::connect(whose.to, whose.line, patience).map_err(|error| {
            Error::new(error.exit, format!("stream {stream} of the move: {}", error.message))
                .hint("this machine goes on as if nothing had been tried; try again")
        })?;
        if let Some(name) = control {
            link::control_congestion(&socket, name)?;
        }
        let writer = join(tls, whose, stream).map_err(|error| {
            Error::new(Exit::Failed, format!("the other machine does not take stream {stream}: {error}"))
                .hint("its console says why; --streams 1 does with one connection")
        })?;
        Ok(Self { writer: Mutex::new(writer), socket })
    }

    fn writer(&self) -> MutexGuard<'_, Writer<Tls>> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends pages, as they are packed.
    ///
    /// # Errors
    /// If the connection is gone.
    pub fn pages(&self, packed: &[u8]) -> io::Result<()> {
        self.writer().pages(packed).map_err(io_error)
    }

    /// What is behind it on its way.
    ///
    /// # Errors
    /// If the connection is gone.
    pub fn flush(&self) -> io::Result<()> {
        self.writer().flush().map_err(io_error)
    }

    /// Says the word that ends the pages.
    ///
    /// # Errors
    /// If the connection is gone.
    pub fn end(&self, word: Word) -> io::Result<()> {
        let mut writer = self.writer();
        writer.say(word, &[]).and_then(|()| writer.flush()).map_err(io_error)
    }

    /// Whoever writes to it does so no more.
    pub fn cut(&self) {
        // One that is gone is cut.
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
    }

    /// How long the other end may take nothing.
    pub fn be_patient(&self, patience: Duration) {
        link::be_patient(&self.socket, patience);
    }
}

/// Nobody waits for the other end's machine, which may be no more.
impl Drop for Lane {
    fn drop(&mut self) {
        link::do_not_linger(&self.socket);
    }
}

/// Shows that it may, and hears that it has been taken.
fn join(tls: Tls, whose: &Whose<'_>, stream: u32) -> io::Result<Writer<Tls>> {
    let binding = session::binding(&tls.conn)?;
    let mut writer = Writer::begin(tls, whose.attempt, stream).map_err(io_error)?;
    writer.prove(&proof(whose.secret, whose.attempt, stream, &binding)).map_err(io_error)?;
    writer.flush().map_err(io_error)?;
    Reader::open(writer.get_mut())
        .and_then(|reader| reader.expect(whose.attempt, stream).map(drop))
        .map_err(io_error)?;
    Ok(writer)
}
