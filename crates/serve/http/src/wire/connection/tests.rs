use std::net::SocketAddr;

use axum::Router;
use axum::routing::get;
use futures::stream;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use super::*;

/// A server whose reply to `GET /` is the pieces that the test sends.
struct Server {
    address: SocketAddr,
    gate: Arc<Gate>,
    stop: watch::Sender<bool>,
    pieces: mpsc::UnboundedSender<&'static str>,
    serving: JoinHandle<()>,
}

impl Server {
    async fn start() -> Self {
        let (pieces, received) = mpsc::unbounded_channel::<&'static str>();
        let received = Arc::new(tokio::sync::Mutex::new(Some(received)));
        let reply = async move || {
            let received = received.lock().await.take();
            Body::from_stream(stream::unfold(received, async |received| {
                let mut received = received?;
                let piece = received.recv().await?;
                Some((Ok::<_, Infallible>(piece), Some(received)))
            }))
        };
        let gate = Arc::new(Gate::loading());
        gate.open(Router::new().route("/", get(reply)));
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let time = Duration::from_secs(3600);
        let limits = ConnectionLimits { count: 10, header_timeout: time, write_timeout: time };
        let (stop, stopped) = watch::channel(false);
        let serving = tokio::spawn(listen(listener, Arc::clone(&gate), limits, None, stopped));
        Self { address, gate, stop, pieces, serving }
    }

    async fn request(&self) -> TcpStream {
        let mut connection = TcpStream::connect(self.address).await.expect("a listener");
        send(&mut connection).await;
        connection
    }

    fn stop(&self) {
        self.gate.close();
        self.stop.send_replace(true);
    }
}

async fn send(connection: &mut TcpStream) {
    connection.write_all(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n").await.expect("open");
}

/// Reads until `end` has come.
async fn read_to(connection: &mut TcpStream, end: &str) -> String {
    let mut text = String::new();
    while !text.contains(end) {
        let mut bytes = [0; 4096];
        let count = connection.read(&mut bytes).await.expect("open");
        assert!(count > 0, "closed after {text:?}");
        text += &String::from_utf8_lossy(&bytes[..count]);
    }
    text
}

/// Goal: when the server stops in the middle of a reply, whose head could not announce it, the reply
/// is completed, and a request that follows on the same connection is answered, not lost. Its reply
/// announces that the connection is closed.
#[tokio::test]
async fn requests_after_a_reply_are_answered_while_the_server_stops() {
    let server = Server::start().await;
    let mut connection = server.request().await;
    server.pieces.send("begun").expect("a reply");
    let head = read_to(&mut connection, "begun").await;
    assert!(head.starts_with("HTTP/1.1 200") && !head.contains("connection: close"), "{head}");
    server.stop();
    // The server has noticed it when it answers so.
    let late = read_to(&mut server.request().await, "stopping").await;
    assert!(late.starts_with("HTTP/1.1 503") && late.contains("connection: close"), "{late}");
    server.pieces.send("ended").expect("a reply");
    drop(server.pieces);
    read_to(&mut connection, "ended\r\n0\r\n\r\n").await;
    send(&mut connection).await;
    let reply = read_to(&mut connection, "stopping").await;
    assert!(reply.starts_with("HTTP/1.1 503") && reply.contains("connection: close"), "{reply}");
    let mut rest = Vec::new();
    connection.read_to_end(&mut rest).await.expect("it is closed");
    server.serving.await.expect("no panic");
}
