//! Sockets without a library, which read nothing by themselves.

use std::io::{Read, Write};
use std::net::TcpStream;

/// A connection that has subscribed to everything.
pub(crate) fn subscribe(endpoint: &str) -> TcpStream {
    let mut connection = connect(endpoint, "SUB");
    // A message of one byte: subscribe to the empty prefix.
    connection.write_all(&[0, 1, 1]).expect("a peer");
    connection
}

/// A connection that has requested a replay of everything.
pub(crate) fn request_replay(endpoint: &str) -> TcpStream {
    let mut connection = connect(endpoint, "DEALER");
    // An empty frame, which another one follows, and a number of 8 bytes.
    connection.write_all(&[1, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0]).expect("a peer");
    connection
}

/// A connection of a socket of this kind by ZMTP 3.0, ZeroMQ's protocol.
fn connect(endpoint: &str, kind: &str) -> TcpStream {
    let (_, port) = endpoint.rsplit_once(':').expect("a port");
    let mut connection = TcpStream::connect(format!("127.0.0.1:{port}")).expect("a listener");
    // The signature, version 3.0, the mechanism NULL, no server, and padding.
    let mut greeting = [0; 64];
    (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
    greeting[12..16].copy_from_slice(b"NULL");
    connection.write_all(&greeting).expect("a peer");
    connection.read_exact(&mut greeting).expect("a greeting");
    let mut ready = b"\x05READY\x0bSocket-Type\x00\x00\x00".to_vec();
    ready.push(kind.len() as u8);
    ready.extend(kind.bytes());
    connection.write_all(&[4, ready.len() as u8]).expect("a peer");
    connection.write_all(&ready).expect("a peer");
    let mut header = [0; 2];
    connection.read_exact(&mut header).expect("a command");
    connection.read_exact(&mut vec![0; header[1].into()]).expect("its body");
    connection
}
