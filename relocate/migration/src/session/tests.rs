//! Sessions over sockets of the loopback's kind: a peer that is not authorized is refused, and
//! reads and says nothing.

use std::{
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    sync::{Arc, Mutex},
    thread,
};

use super::*;

pub(super) const HOUR: Duration = Duration::from_secs(3600);

pub(super) fn pair() -> (UnixStream, UnixStream) {
    let (near, far) = UnixStream::pair().expect("a pair");
    for socket in [&near, &far] {
        socket.set_read_timeout(Some(Duration::from_secs(60))).expect("set");
    }
    (near, far)
}

/// Returns the result of each end when one connects to the other and says something.
fn meet(receiver: &Receiver, config: ClientConfig) -> (Result<Vec<u8>, Error>, Result<(), Error>) {
    let (near, far) = pair();
    thread::scope(|scope| {
        let sender = scope.spawn(move || {
            let mut session = connect_with(config, near)?;
            session.write_all(b"payload").map_err(Error::Refused)?;
            session.conn.send_close_notify();
            session.flush().map_err(Error::Refused)
        });
        let received = receiver.accept(far).and_then(|mut session| {
            let mut payload = Vec::new();
            session.read_to_end(&mut payload).map_err(Error::Refused)?;
            Ok(payload)
        });
        (received, sender.join().expect("no panic"))
    })
}

fn config(token: &PairingToken) -> ClientConfig {
    sender(token, SystemTime::now()).expect("a sender")
}

fn refuses_both(receiver: &Receiver, config: ClientConfig) -> [String; 2] {
    let (received, sent) = meet(receiver, config);
    [received.expect_err("received").to_string(), sent.expect_err("sent").to_string()]
}

#[test]
fn the_line_is_enough() {
    let (receiver, token) = Receiver::new(HOUR).expect("a receiver");
    let pasted: PairingToken = format!("  {token}\n").parse().expect("a token");
    let (received, sent) = meet(&receiver, config(&pasted));
    sent.expect("sent");
    assert_eq!(received.expect("received"), b"payload");
    assert_eq!(format!("{token:?}"), "PairingToken(..)");
}

#[test]
fn mistakes_in_the_line_are_found() {
    let (_, token) = Receiver::new(HOUR).expect("a receiver");
    let text = token.to_string();
    assert_eq!(text.len(), "mercury-receive-1-".len() + 104);
    for at in 0..text.len() {
        let mut bytes = text.clone().into_bytes();
        bytes[at] = if bytes[at] == b'3' { b'4' } else { b'3' };
        let wrong = String::from_utf8(bytes).expect("text");
        assert!(wrong.parse::<PairingToken>().is_err(), "{wrong}");
        assert!(text[..at].parse::<PairingToken>().is_err());
    }
    assert!("mercury-receive-1-é".parse::<PairingToken>().is_err());
}

/// The receiver is right and the secret is another one: the key is wrong.
#[test]
fn a_wrong_key_is_refused() {
    let (receiver, token) = Receiver::new(HOUR).expect("a receiver");
    let certificate = receiver_certificate(&receiver, &token);
    let wrong = PairingToken::new([9; 16], &certificate);
    let [received, _] = refuses_both(&receiver, config(&wrong));
    assert!(received.contains("certificate"), "{received}");
}

/// Returns the receiver's certificate, as a client sees it.
fn receiver_certificate(receiver: &Receiver, token: &PairingToken) -> CertificateDer<'static> {
    let (near, far) = pair();
    thread::scope(|scope| {
        let sender = scope.spawn(move || connect(token, near).expect("a session"));
        receiver.accept(far).expect("a session");
        let session = sender.join().expect("no panic");
        session.conn.peer_certificates().expect("certificates")[0].clone().into_owned()
    })
}

#[test]
fn another_receiver_is_refused() {
    let (_, token) = Receiver::new(HOUR).expect("a receiver");
    let (other, _) = Receiver::new(HOUR).expect("a receiver");
    let [_, sent] = refuses_both(&other, config(&token));
    assert!(sent.contains("certificate"), "{sent}");
}

#[test]
fn no_certificate_is_refused() {
    let (receiver, token) = Receiver::new(HOUR).expect("a receiver");
    let mut config = builder(&token).expect("a builder").with_no_client_auth();
    prepare(&mut config, PROTOCOL);
    let [received, _] = refuses_both(&receiver, config);
    assert!(received.contains("certificate"), "{received}");
}

#[test]
fn an_expired_token_is_refused() {
    let long_ago = SystemTime::now() - 72 * HOUR;
    let (receiver, token) = Receiver::at(long_ago, HOUR).expect("a receiver");
    let [_, sent] = refuses_both(&receiver, config(&token));
    assert!(sent.contains("xpired"), "{sent}");
    let (receiver, token) = Receiver::new(HOUR).expect("a receiver");
    let [received, _] = refuses_both(&receiver, sender(&token, long_ago).expect("a sender"));
    assert!(received.contains("xpired"), "{received}");
}

#[test]
fn another_protocol_is_refused() {
    let (receiver, token) = Receiver::new(HOUR).expect("a receiver");
    for protocols in [Vec::new(), vec![b"http/1.1".to_vec()]] {
        let mut config = config(&token);
        config.alpn_protocols = protocols;
        let _ = refuses_both(&receiver, config);
    }
}

/// A socket that keeps everything that it sends.
struct Tapped {
    socket: UnixStream,
    sent: Arc<Mutex<Vec<u8>>>,
}

impl Read for Tapped {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.socket.read(buffer)
    }
}

impl Write for Tapped {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.socket.write(bytes)?;
        self.sent.lock().expect("no panic").extend_from_slice(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.socket.flush()
    }
}

/// Returns everything that a good sender sends, up to the end of its payload.
fn recorded(receiver: &Receiver, token: &PairingToken) -> Vec<u8> {
    let (near, far) = pair();
    let sent = Arc::new(Mutex::new(Vec::new()));
    let tapped = Tapped { socket: near, sent: Arc::clone(&sent) };
    thread::scope(|scope| {
        scope.spawn(move || {
            let mut session = connect(token, tapped).expect("a session");
            session.write_all(b"payload").and_then(|()| session.flush()).expect("said");
        });
        let mut payload = [0; 7];
        receiver.accept(far).expect("a session").read_exact(&mut payload).expect("heard");
        assert_eq!(&payload, b"payload");
    });
    let sent = sent.lock().expect("no panic");
    sent.clone()
}

/// Plays bytes to the receiver, and returns its result.
fn played(receiver: &Receiver, bytes: &[u8]) -> Result<(), Error> {
    let (mut near, far) = pair();
    let drain = near.try_clone().expect("a socket");
    thread::scope(|scope| {
        scope.spawn(move || {
            let _ = near.write_all(bytes);
            let _ = near.shutdown(std::net::Shutdown::Write);
        });
        let drain = scope.spawn(move || io::copy(&mut { drain }, &mut io::sink()));
        let result = receiver.accept(far).map(|_| ());
        let _ = drain.join();
        result
    })
}

#[test]
fn a_replay_is_refused() {
    let (receiver, token) = Receiver::new(HOUR).expect("a receiver");
    let sent = recorded(&receiver, &token);
    assert!(played(&receiver, &sent).is_err());
    // The replay was the only fault.
    let (received, sent) = meet(&receiver, config(&token));
    assert!(received.is_ok() && sent.is_ok());
}

#[test]
fn handshakes_cut_short_or_damaged_are_refused() {
    let (receiver, token) = Receiver::new(HOUR).expect("a receiver");
    let sent = recorded(&receiver, &token);
    for length in (0..sent.len()).step_by(29) {
        assert!(played(&receiver, &sent[..length]).is_err());
        let mut damaged = sent.clone();
        damaged[length] ^= 0x20;
        assert!(played(&receiver, &damaged).is_err());
    }
    assert!(played(&receiver, b"\x89MMove\r\n payload without a handshake").is_err());
}

#[test]
fn an_identity_can_be_carried() {
    let (identity, token) = Identity::new(SystemTime::now(), Duration::from_secs(60)).expect("one");
    let carried = Identity::from_bytes(&identity.to_bytes()).expect("the same");
    assert_eq!(Receiver::with(&carried).expect("a receiver").token(), &token);
    assert!(Identity::from_bytes(&identity.to_bytes()[..40]).is_err());
}

/// A sender with the token is told why it is not accepted now; no other sender is.
#[test]
fn a_second_sender_is_told_why() {
    let (receiver, token) = Receiver::new(HOUR).expect("a receiver");
    let (_, other) = Receiver::new(HOUR).expect("another one");
    let why = "x".repeat(300);
    for (token, is_known) in [(token, true), (other, false)] {
        let (near, far) = pair();
        thread::scope(|scope| {
            let sender = scope.spawn(move || connect_with(config(&token), near).map(drop));
            assert_eq!(receiver.turn_away(far, &why).is_ok(), is_known);
            match sender.join().expect("no panic") {
                Err(Error::NotNow(told)) => assert!(is_known && told == why[..255]),
                Err(_) => assert!(!is_known),
                Ok(()) => panic!("let in"),
            }
        });
    }
}
