// Shows the document of the API. Without a validator: that would be a request to another server.

SwaggerUIBundle({ url: "openapi.json", dom_id: "#swagger-ui", deepLinking: true, validatorUrl: null });
