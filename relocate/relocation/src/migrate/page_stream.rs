//! The source's streams besides the first. Each carries pages by a connection of its own
//! ([`mercury_migration::streams`]). The thread that has packed pages writes them.

use super::link::{self, io_error};
use mercury_control::{
    error::{Error, Result},
    exit::Exit,
};
use mercury_migration::{
    announcement::Secret,
    protocol::{Attempt, Word},
    session::{self, PairingToken},
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

#[derive(Debug)]
pub struct PageStream {
    writer: Mutex<Writer<Tls>>,
    /// The socket of the stream's session.
    socket: OwnedFd,
}

/// The common parts of an attempt's streams.
#[derive(Clone, Copy, Debug)]
pub struct AttemptStreams<'a> {
    /// Address of the destination.
    pub to: SocketAddr,
    /// Pairing token of the receiver.
    pub token: &'a PairingToken,
    pub attempt: Attempt,
    /// Secret of the offer.
    pub secret: &'a Secret,
}

impl PageStream {
    /// Opens a stream, and waits until the other end has accepted it.
    ///
    /// # Errors
    ///
    /// Returns an error if the other end does not accept it.
    pub fn open(
        attempt_streams: &AttemptStreams<'_>,
        stream: u32,
        patience: Duration,
        control: Option<&str>,
    ) -> Result<Self> {
        let (tls, socket) =
            link::connect(attempt_streams.to, attempt_streams.token, patience).map_err(|error| {
                Error::new(error.exit, format!("stream {stream} of the move: {}", error.message))
                    .hint("this machine goes on as if nothing had been tried; try again")
            })?;
        if let Some(name) = control {
            link::control_congestion(&socket, name)?;
        }
        let writer = join(tls, attempt_streams, stream).map_err(|error| {
            Error::new(Exit::Failed, format!("the destination does not accept stream {stream}: {error}"))
                .hint("its console says why; --streams 1 uses a single connection")
        })?;
        Ok(Self { writer: Mutex::new(writer), socket })
    }

    fn writer(&self) -> MutexGuard<'_, Writer<Tls>> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends packed pages.
    ///
    /// # Errors
    ///
    /// Returns an error if the connection is gone.
    pub fn pages(&self, packed: &[u8]) -> io::Result<()> {
        self.writer().pages(packed).map_err(io_error)
    }

    /// Flushes the stream.
    ///
    /// # Errors
    ///
    /// Returns an error if the connection is gone.
    pub fn flush(&self) -> io::Result<()> {
        self.writer().flush().map_err(io_error)
    }

    /// Sends the word that ends the pages.
    ///
    /// # Errors
    ///
    /// Returns an error if the connection is gone.
    pub fn end(&self, word: Word) -> io::Result<()> {
        let mut writer = self.writer();
        writer.say(word, &[]).and_then(|()| writer.flush()).map_err(io_error)
    }

    /// Cuts the connection, so that a thread that writes to it stops.
    pub fn cut(&self) {
        // A connection that is gone is cut already.
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
    }

    /// Returns the number of bytes that the other end's system has not taken yet.
    pub fn waiting_bytes(&self) -> u64 {
        link::waiting_bytes(&self.socket)
    }

    /// Sets the time for which the other end may accept nothing.
    pub fn be_patient(&self, patience: Duration) {
        link::be_patient(&self.socket, patience);
    }
}

/// Dropping does not wait for the other machine, which may be gone.
impl Drop for PageStream {
    fn drop(&mut self) {
        link::do_not_linger(&self.socket);
    }
}

/// Proves that this stream belongs to the attempt, and waits for the acceptance.
fn join(tls: Tls, attempt_streams: &AttemptStreams<'_>, stream: u32) -> io::Result<Writer<Tls>> {
    let binding = session::binding(&tls.conn)?;
    let mut writer = Writer::begin(tls, attempt_streams.attempt, stream).map_err(io_error)?;
    writer
        .prove(&proof(attempt_streams.secret, attempt_streams.attempt, stream, &binding))
        .map_err(io_error)?;
    writer.flush().map_err(io_error)?;
    Reader::open(writer.get_mut())
        .and_then(|reader| reader.expect(attempt_streams.attempt, stream).map(drop))
        .map_err(io_error)?;
    Ok(writer)
}
